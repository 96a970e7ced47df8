"""A function that rank 0 runs for all ranks fails there.

ranks: 2
all: CollectiveError
    says run_on_main failed on rank 0: FileNotFoundError
    shows %read, in read_config
"""

import pathlib

import objcomm


def read_config() -> str:
    """Read a file that does not exist."""
    return pathlib.Path("/no/such/config.json").read_text()  # @read


objcomm.init()
config = objcomm.run_on_main(read_config)
