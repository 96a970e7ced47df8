"""The sizes of a message's buffers are those that its header announced and the limits allowed."""

import pytest
import torch

from objcomm import WireError
from objcomm._codecs.pickle5 import PickleCodec
from objcomm._wire.header import Header, unpack_table
from objcomm._wire.message import compose


@pytest.mark.parametrize("difference", [-1, 1, -400_000])
@pytest.mark.parametrize("field", ["body_nbytes", "payload_nbytes"])
def test_sizes_that_do_not_add_up_are_refused(field: str, difference: int) -> None:
    encoded = PickleCodec().encode([torch.zeros(100_000), torch.zeros(10)])
    message = compose(Header(), encoded.meta, encoded.buffers)
    header, body = message.header, memoryview(message.body)
    sizes = [row.nbytes for row in unpack_table(header, body)]
    assert sizes == [400_000, 40]
    wrong = header._replace(**{field: getattr(header, field) + difference})
    with pytest.raises(WireError, match="does not add up"):
        unpack_table(wrong, body)
