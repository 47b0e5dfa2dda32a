"""Why a drafter that trained well is accepted badly: the known causes, tried one by one."""
