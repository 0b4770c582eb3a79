"""Every loss and shape of the GPU's step in Triton's interpreter; the fast suite takes some."""

import pytest

from gpu_tables import IS_COMPILED, NOT_INTERPRETED
from test_gpu_step import KINDS, LOSSES, SHAPES, Pair

pytestmark = pytest.mark.skipif(IS_COMPILED, reason=NOT_INTERPRETED)


@pytest.mark.parametrize("for_each", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("loss", LOSSES)
def test_two_steps_equal_those_in_torch(loss, for_each):
    pair = Pair("cpu", loss=loss, for_each=for_each, is_adam=loss == "softmax", batch_size=4)
    for _ in range(2):
        pair.assert_step_is_that_of_torch()


@pytest.mark.parametrize("for_each", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_equals_torch(name, for_each):
    if name == "all labels sampled" and for_each:
        pytest.skip("an example's own positives cannot be drawn for it")
    pair = Pair("cpu", for_each=for_each, seed=1, **SHAPES[name])
    pair.assert_step_is_that_of_torch()
