"""An export is whole or not there, in S3 and on disk, however it ends; it replaces only what an export wrote."""

import json
import multiprocessing
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dflash_core import local_files
from dflash_core.drafter.folder import entry_name, load_drafter, verify_folder
from dflash_core.drafter.model import Drafter
from dflash_core.errors import IncompatibleError, ObjectCorrupt, ObjectMissing, StorageError
from dflash_core.export.export import export_drafter, fetch_export, find_export, verify_export
from dflash_core.local_files import building
from dflash_core.recipe import ExportSettings, Recipe
from dflash_core.records import DrafterExport, StoredObject
from dflash_core.storage.s3 import Store
from dflash_core.target.files import load_head
from dflash_core.workspace import Workspace, connect
from tests.drafter.conftest import RUN
from tests.training.crash import Crossings

Finished = tuple[Recipe, Drafter]
NAMES = ["README.md", "config.json", "manifest.json", "model.safetensors"]
SPECULATORS = ["speculators/config.json", "speculators/model.safetensors"]
BUSY = AssertionError("somebody else builds there")


def to(recipe: Recipe, local: Path | None, dtype: Any = "float32", speculators: bool = True) -> Workspace:
    export = ExportSettings(dtype=dtype, local_dir=local, speculators=speculators)
    return connect(recipe.model_copy(update={"export": export}))


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_both_places_hold_the_same_files_with_a_manifest(finished: Finished, s3: Store, tmp_path: Path) -> None:
    recipe, _ = finished
    local = tmp_path / "out" / "drafter"
    export = export_drafter(to(recipe, local), None)
    assert names(local) == sorted([*NAMES, *SPECULATORS])
    assert find_export(s3, None) == export == verify_folder(local, RUN)
    for file in export.files:
        assert s3.read(file) == (local / entry_name(export, file)).read_bytes()
    assert [path.name for path in local.parent.iterdir()] == ["drafter"]
    assert verify_export(to(recipe, local), RUN) == export
    export_drafter(to(recipe, local, speculators=False), None)
    assert names(local) == NAMES


def test_the_speculators_form_nests_the_shape_counts_from_the_embedding_and_brings_the_ends(
    finished: Finished, tmp_path: Path
) -> None:
    recipe, drafter = finished
    export_drafter(to(recipe, tmp_path / "drafter"), None)
    folder = tmp_path / "drafter" / "speculators"
    table = json.loads((folder / "config.json").read_text())
    assert table["speculators_model_type"] == "dflash"
    assert table["aux_hidden_state_layer_ids"] == [2, 4]
    assert (table["block_size"], table["mask_token_id"], table["draft_vocab_size"]) == (4, 96, 97)
    assert table["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    verifier = {"name_or_path": str(recipe.target.path), "architectures": ["Qwen3ForCausalLM"]}
    assert table["speculators_config"]["verifier"] == verifier
    shape = table["transformer_layer_config"]
    assert (shape["model_type"], shape["num_hidden_layers"], shape["head_dim"]) == ("qwen3", 1, 16)
    assert not {"dflash_config", "auto_map", "num_target_layers", "architectures"} & shape.keys()
    head = load_head(recipe.target.path, torch.float32, torch.device("cpu"))
    stored = load_file(folder / "model.safetensors")
    assert torch.equal(stored.pop("embed_tokens.weight"), head.embedding)
    assert torch.equal(stored.pop("lm_head.weight"), head.lm_head)
    assert stored.keys() == drafter.state_dict().keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in drafter.state_dict().items())


def test_fp32_comes_back_bit_for_bit_and_bf16_is_rounded_once(finished: Finished, tmp_path: Path) -> None:
    recipe, drafter = finished
    for dtype in ("float32", "bfloat16"):
        export_drafter(to(recipe, tmp_path / dtype, dtype), None)
        back = load_drafter(tmp_path / dtype).state_dict()
        for name, master in drafter.state_dict().items():
            assert back[name].dtype == torch.float32
            assert torch.equal(back[name], master.to(getattr(torch, dtype)).float())
            assert torch.equal(back[name].bfloat16().float(), master.bfloat16().float())


def export_until(recipe: Recipe, deadly: int, crossings: Any) -> None:
    count = Crossings(deadly)
    os.fsync, os.rename, shutil.rmtree = map(count.around, (os.fsync, os.rename, shutil.rmtree))  # type: ignore[assignment]
    Store.put = count.around(Store.put)  # type: ignore[method-assign]
    Store.upload = count.around(Store.upload)  # type: ignore[method-assign]
    Store.delete = count.around(Store.delete)  # type: ignore[method-assign]
    export_drafter(connect(recipe), RUN)
    crossings.send(count.crossed)


def in_process(recipe: Recipe, deadly: int) -> int | None:
    """Export in a process of its own: how many crossings it has; None: it was killed at the `deadly`-th."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=export_until, args=(recipe, deadly, sender))
    process.start()
    sender.close()
    try:
        crossed: int | None = receiver.recv()
    except EOFError:
        crossed = None
    process.join()
    assert process.exitcode == (-signal.SIGKILL if crossed is None else 0)
    return crossed


def test_a_kill_at_any_instant_leaves_a_whole_export_or_none_and_the_same_command_completes_it(
    finished: Finished, s3: Store, tmp_path: Path
) -> None:
    recipe, _ = finished
    local = tmp_path / "out" / "drafter"
    made = {dtype: to(recipe, local, dtype, speculators=False) for dtype in ("float32", "bfloat16")}
    whole = {dtype: export_drafter(workspace, RUN).files for dtype, workspace in made.items()}
    crossings = in_process(made["float32"].recipe, 0)
    assert crossings is not None
    assert crossings > 20
    before, after = "float32", "bfloat16"
    seen = set()
    for deadly in range(1, crossings + 1, 2):  # between two calls nothing changes
        assert in_process(made[after].recipe, deadly) is None
        for place, manifest in (("local", left_locally(local)), ("s3", left_in_s3(s3))):
            assert manifest is None or manifest.files == whole[manifest.dtype]
            seen.add((place, {before: "old", after: "new", None: None}[manifest and manifest.dtype]))
        with building(local, BUSY):
            assert left_locally(local) is not None
        assert export_drafter(made[after], RUN).files == whole[after] == verify_folder(local, RUN).files
        assert left_in_s3(s3) is not None
        assert [path.name for path in local.parent.iterdir()] == ["drafter"]
        before, after = after, before
    assert seen == {(place, state) for place in ("local", "s3") for state in ("old", None, "new")}


def left_locally(folder: Path) -> DrafterExport | None:
    return verify_folder(folder) if folder.exists() else None


def left_in_s3(s3: Store) -> DrafterExport | None:
    try:
        manifest = find_export(s3, RUN)
    except ObjectMissing:
        return None
    for file in manifest.files:
        s3.read(file)
    return manifest


def test_foreign_files_are_never_removed(finished: Finished, s3: Store, tmp_path: Path) -> None:
    recipe, _ = finished
    mine = tmp_path / "mine"
    export_drafter(to(recipe, mine), None)
    (mine / "speculators" / "thesis.txt").write_text("x")
    s3.put(f"drafter_export/{RUN}/thesis.txt", b"x")
    held = names(mine)
    with pytest.raises(StorageError, match=r"holds speculators/thesis\.txt, which no export wrote \(1 such files\)"):
        export_drafter(to(recipe, mine, "bfloat16"), None)
    assert names(mine) == held
    assert load_drafter(mine).config.dtype == "float32"
    assert s3.get(f"drafter_export/{RUN}/thesis.txt").body == b"x"
    (mine / "manifest.json").write_text("{}")
    with pytest.raises(StorageError, match=r"is not a manifest that this version can read"):
        export_drafter(to(recipe, mine), None)
    assert names(mine) == held
    with pytest.raises(StorageError, match=r"manifest\.json is a file; name a folder"):
        export_drafter(to(recipe, mine / "manifest.json"), None)


def test_two_exports_to_one_place_are_refused(finished: Finished, tmp_path: Path) -> None:
    recipe, _ = finished
    with building(tmp_path / "drafter", BUSY), pytest.raises(StorageError, match="another process is exporting"):
        export_drafter(to(recipe, tmp_path / "drafter"), None)
    export_drafter(to(recipe, tmp_path / "drafter"), None)


def test_a_changed_missing_or_foreign_export_is_named_with_both_values(
    finished: Finished, s3: Store, tmp_path: Path
) -> None:
    recipe, _ = finished
    local = tmp_path / "drafter"
    workspace = to(recipe, local)
    with pytest.raises(ObjectMissing, match=r"has not been exported whole; export it first"):
        verify_export(workspace, RUN)
    export = export_drafter(workspace, RUN)
    weights = local / "model.safetensors"
    body = bytearray(weights.read_bytes())
    body[-1] ^= 1
    weights.write_bytes(body)
    with pytest.raises(IncompatibleError, match=rf"sha256 \w{{12}}, its manifest says {len(body)} with \w{{12}}"):
        verify_export(workspace, RUN)
    weights.unlink()
    with pytest.raises(IncompatibleError, match=r"model\.safetensors has 0 bytes with sha256 absent"):
        verify_folder(local)
    with pytest.raises(IncompatibleError, match=rf"holds the export of run {RUN}, not of other"):
        verify_folder(local, "other")
    with pytest.raises(IncompatibleError, match=r"holds no manifest\.json"):
        verify_folder(tmp_path)
    export_drafter(workspace, RUN)
    s3.put(export.files[1].key, bytes(body))
    with pytest.raises(ObjectCorrupt, match=r"model\.safetensors is not what its manifest says"):
        verify_export(workspace, RUN)
    escaping = export.model_copy(update={"files": (StoredObject(key="../x", size=1, sha256=""),)})
    with pytest.raises(IncompatibleError, match=r"names '\.\./x', which is not a file of its export"):
        fetch_export(s3, escaping, tmp_path)


def test_another_target_or_tokenizer_and_a_run_that_is_not_whole_are_refused(
    finished: Finished, s3: Store, tmp_path: Path
) -> None:
    recipe, _ = finished
    other = tmp_path / "other"
    shutil.copytree(recipe.target.path, other)
    weights = other / "model.safetensors"
    body = bytearray(weights.read_bytes())
    body[-1] ^= 1
    weights.write_bytes(body)
    moved = recipe.target.model_copy(update={"path": other})
    with pytest.raises(IncompatibleError, match=r"was trained with target \w{12}, .* is \w{12}"):
        export_drafter(connect(recipe.model_copy(update={"target": moved})), RUN)
    (other / "tokenizer.json").write_text((other / "tokenizer.json").read_text().replace("w95", "w95x"))
    rules = recipe.tokenization.model_copy(update={"tokenizer": other})
    with pytest.raises(IncompatibleError, match=r"tokenizer\.json of sha256 \w{12}, the one in .*other has \w{12}"):
        export_drafter(connect(recipe.model_copy(update={"tokenization": rules})), RUN)
    key = f"drafter_checkpoint/{RUN}/model.safetensors"
    s3.client.delete_object(Bucket=s3.bucket, Key=s3.prefix + key)
    with pytest.raises(
        ObjectMissing, match=rf"run {RUN} is not whole any more: .*model\.safetensors.*; train it again"
    ):
        export_drafter(connect(recipe), RUN)


def test_nothing_is_left_aside_when_an_export_fails(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, _ = finished

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(local_files.os, "fsync", full)
    (tmp_path / "out").mkdir()
    with pytest.raises(StorageError, match="No space left on device; free disk space"):
        export_drafter(to(recipe, tmp_path / "out" / "drafter"), RUN)
    assert list((tmp_path / "out").iterdir()) == []
