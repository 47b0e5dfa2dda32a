"""A vLLM server of our own, from another Python environment: the target alone, or with a drafter.

The trade-off: vLLM pins its own torch and transformers, so it is a program that we start, never a library that we
import; everything else about it is asked over HTTP, as with a server that somebody else started.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_core.errors import UserError
from dflash_core.export.card import vllm_environment
from dflash_core.processes import free_ports, last_words, running_server
from dflash_core.serving.server import Server

EXTENSION = Path(__file__).parent / "vllm_extension"
START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 20.0
ENVIRONMENT = {
    "PYTHONPATH": str(EXTENSION),
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


@dataclass(frozen=True)
class VllmOptions:
    """How vLLM serves."""

    dtype: str = "float32"
    """float32 where output shall equal the target's own token by token; bfloat16 breaks ties otherwise now and then."""
    threads: int = 1
    """OpenMP threads of a CPU build; for small targets on busy cores more of them only wait for each other."""
    max_num_seqs: int = 4
    """Requests decoded together."""
    speculative_tokens: int | None = None
    """Proposals a step; None: as many as the drafter's block has slots after the anchor."""
    more: tuple[str, ...] = ()
    """Further options of vLLM's server."""


DEFAULTS = VllmOptions()


@contextmanager
def vllm_server(
    python: Path, target: Path, drafter: Path | None, log: Path, options: VllmOptions = DEFAULTS
) -> Iterator[Server]:
    """Serve on loopback while the context lasts.

    Args:
        python: the interpreter of an environment with vLLM.
        target: a Hugging Face folder, its name the served model's.
        drafter: an exported folder in the published or the speculators form; None: without.
        log: where vLLM's output goes.

    Raises:
        UserError: vLLM is not there or does not come up; the sentence holds its last words.
    """
    if not python.exists():
        raise UserError(f"{python} does not exist; name the python of an environment with vLLM (make serving-env)")
    port = str(free_ports(1)[0])
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", port]
    command += ["--model", str(target), "--served-model-name", target.name, "--dtype", options.dtype]
    command += ["--enforce-eager", "--max-num-seqs", str(options.max_num_seqs), *options.more]
    environment = ENVIRONMENT | {"OMP_NUM_THREADS": str(options.threads)}
    if drafter is not None:
        config = _config(drafter)
        layers = config.get("transformer_layer_config", config)
        environment |= vllm_environment(list(layers["layer_types"]))
        command += ["--speculative-config", json.dumps(speculative_config(drafter, options.speculative_tokens))]
        command += ["--worker-extension-cls", "dflash_vllm_cpu.ContextKeys"]
    server = Server(f"http://127.0.0.1:{port}")
    with running_server(command, "TERM", STOP_TIMEOUT_S, log, environment) as process:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not server.answers():
            if process.poll() is not None or time.monotonic() > deadline:
                raise UserError(f"vLLM does not serve {target} with {drafter}: {last_words(log)} (all of it in {log})")
            time.sleep(0.5)
        yield server


def speculative_config(drafter: Path, proposals: int | None) -> dict[str, object]:
    """What vLLM is told about a drafter; its block holds the anchor and at most one proposal less than it has slots."""
    most = _config(drafter)["block_size"] - 1
    return {"method": "dflash", "model": str(drafter), "num_speculative_tokens": proposals or most}


def _config(drafter: Path) -> dict[str, Any]:
    """config.json of either form."""
    table: dict[str, Any] = json.loads((drafter / "config.json").read_text(encoding="utf8"))
    return table
