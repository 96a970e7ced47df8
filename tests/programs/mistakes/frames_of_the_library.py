"""An argument is wrong; the traceback shows the program's own lines and folds the library's.

ranks: 2
all: UsageError
    shows %main
    shows %broadcast
    never /objcomm/_
    never objcomm._
"""

import objcomm


def main() -> None:
    """Pass a rank that does not exist."""
    objcomm.broadcast("config", src=7)  # @broadcast


objcomm.init()
main()  # @main
