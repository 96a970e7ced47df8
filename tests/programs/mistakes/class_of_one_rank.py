"""Rank 0 sends an object whose module is not installed where rank 1 runs.

ranks: 2
0: exit 0
1: DecodeError
    says rank 0 … broadcast … at @broadcast | broadcast … rank 0 … at @broadcast
    says tokenizer_of_rank_0
    says install it here | not installed
"""

import pathlib
import sys
import tempfile

import objcomm

objcomm.init()
tokenizer = None
if objcomm.rank() == 0:
    folder = tempfile.mkdtemp()
    pathlib.Path(folder, "tokenizer_of_rank_0.py").write_text("class Tokenizer: pass")
    sys.path.insert(0, folder)
    import tokenizer_of_rank_0

    tokenizer = tokenizer_of_rank_0.Tokenizer()
tokenizer = objcomm.broadcast(tokenizer)  # @broadcast
