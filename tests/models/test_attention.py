"""Attention within rows, against float64 by its definition."""

import inspect
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import profile
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from toolkit.models import attention
from toolkit.models.attention import attention_by_rows, planned_for_cpu

MODULE = SimpleNamespace(num_key_value_groups=2, is_causal=True)


def heads(lines: int, length: int, of_value: int = 16) -> list[Tensor]:
    """Query, key and value, two heads to a key, as a model has them: the token's heads one after the other."""
    torch.manual_seed(0)
    shapes = (lines, length, 4, 16), (lines, length, 2, 16), (lines, length, 2, of_value)
    return [torch.randn(shape, dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for shape in shapes]


def by_definition(given: list[Tensor], allowed: Tensor, scale: float) -> tuple[list[Tensor], Tensor]:
    """The same in float64, and what comes of it, (B, L, heads, size)."""
    query, key, value = exact = [part.detach().double().requires_grad_() for part in given]
    products = query @ key.repeat_interleave(2, 1).transpose(2, 3) * scale
    shares = products.masked_fill(~allowed, -torch.inf).softmax(-1)
    return exact, (shares @ value.repeat_interleave(2, 1)).transpose(1, 2)


def assert_exact_to_the_last_bit(
    found: Tensor,
    given: list[Tensor],
    allowed: Tensor,
    scale: float = 16**-0.5,
    *,
    autocast: bool = False,
    summed: bool = False,
) -> None:
    """
    Args:
        summed: whether gradients are sums of rounded ones.
    """
    exact, expected = by_definition(given, allowed, scale)
    assert found.dtype is torch.bfloat16 and found.shape == expected.shape
    along = torch.randn_like(found)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        of_found = torch.autograd.grad(found, given, along)
    of_expected = torch.autograd.grad(expected, exact, along.double())
    for ours, theirs in zip((found, *of_found), (expected, *of_expected), strict=True):
        # Half of bfloat16's last bit is at most 2^-9 of a number; torch's own gradients are 1.5 times that away.
        assert (ours.double() - theirs).norm() < 2 ** (-8 if summed else -9) * theirs.norm()


def within_rows(lengths: list[int]) -> Tensor:
    """(L, L), True where a token attends to another: of its row, and not after it."""
    row_of = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return (row_of[:, None] == row_of) & torch.ones(len(row_of), len(row_of), dtype=torch.bool).tril()


@pytest.mark.parametrize(
    ("lines", "lengths", "of_value"),
    [
        (1, [40, 5], 16),
        (1, [5, 1, 20, 3, 70, 2, 64, 64, 75, 9], 16),  # of many sizes, filled up to few
        (1, [7, 300, 129, 40], 16),  # several blocks of queries, the last of them short
        (2, [45], 24),  # lines of a row each, values longer than keys
    ],
)
@pytest.mark.parametrize("autocast", [False, True], ids=["after autocast", "in it"])
def test_gradients_of_rows_in_bfloat16_are_exact_to_their_last_bit(lines, lengths, of_value, autocast):
    given = heads(lines, sum(lengths), of_value)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, _ = attention_by_rows(MODULE, *given, None, row_lengths=lengths if lines == 1 else None)
    assert_exact_to_the_last_bit(found, given, within_rows(lengths), autocast=autocast)


@pytest.mark.parametrize(
    ("common", "lengths"),
    [
        (24, [40, 5, 20, 9, 60]),
        (24, [140, 5, 300, 20, 30, 1, 64, 64]),
        (128, [144, 16, 70]),  # a block of the first row has as many queries and keys as another one with the beginning
        (200, [210, 5, 60]),  # one of it ends within the beginning
    ],
)
@pytest.mark.parametrize("masked", [False, True])
def test_so_are_those_of_rows_with_a_common_beginning(common, lengths, masked):
    """A mask of a window, too, as a model makes it for the line, goes by each row's own numbers."""
    given, window = heads(1, sum(lengths)), 30
    number = torch.cat([torch.arange(n) + (common if row else 0) for row, n in enumerate(lengths)])
    allowed = within_rows(lengths)
    allowed[lengths[0] :, :common] = True
    steps = torch.arange(len(number))
    mask = (steps[:, None] >= steps) & (steps[:, None] - steps < window) if masked else None
    if masked:
        allowed &= number[:, None] - number < window
    told = {"row_lengths": lengths, "common_length": common}
    found, _ = attention_by_rows(MODULE, *given, None if mask is None else mask[None, None], **told)
    assert_exact_to_the_last_bit(found, given, allowed, summed=masked)


def test_rows_of_many_lengths_are_multiplied_at_once():
    lengths = [64, 12, 52, 33, 25, 23, 47, 2]
    given = heads(1, sum(lengths))
    with profile() as calls:
        found, _ = attention_by_rows(MODULE, *given, None, row_lengths=lengths, common_length=24)
        torch.autograd.grad(found, given, torch.ones_like(found))
    # Two products forwards and five back, of one batch.
    assert {call.key: call.count for call in calls.key_averages()}["aten::bmm"] == 7


@pytest.mark.parametrize("of_mask", [torch.bool, torch.bfloat16, "bias"])
def test_so_are_those_of_rows_that_a_mask_tells_apart(of_mask):
    """
    Args:
        of_mask: of what the mask is, as transformers gives it; "bias" where a model's own bias by positions does it.
    """
    if of_mask == "bias" and "position_bias" not in inspect.signature(sdpa_attention_forward).parameters:
        pytest.skip("this transformers knows no bias by positions")
    given, allowed, told = heads(1, 45), within_rows([40, 5]), {}
    mask = allowed[None, None]
    if of_mask is not torch.bool:
        mask = torch.zeros(mask.shape, dtype=torch.bfloat16).masked_fill(~mask, torch.finfo(torch.bfloat16).min)
    if of_mask == "bias":
        told, mask = {"position_bias": mask}, None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, _ = attention_by_rows(MODULE, *given, mask, **told)
    assert_exact_to_the_last_bit(found, given, allowed)


@pytest.mark.parametrize("told_by", ["module", "call"])
def test_so_are_those_of_tokens_that_see_all_others(told_by):
    given = heads(1, 45)
    module = SimpleNamespace(num_key_value_groups=2, is_causal=told_by == "call")
    found, _ = attention_by_rows(module, *given, None, **({"is_causal": False} if told_by == "call" else {}))
    assert_exact_to_the_last_bit(found, given, torch.ones(45, 45, dtype=torch.bool))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("masked", [False, True])
def test_one_new_token_a_row_attends_to_the_cache_without_a_copy_of_it(masked, dtype, monkeypatch):
    given = [part.detach().to(dtype) for part in heads(3, 45, of_value=24)]
    given[0] = given[0][:, :, -1:]
    allowed = torch.ones(3, 1, 1, 45, dtype=torch.bool)
    allowed[1, ..., :7] = not masked
    asked, own = [], torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *of_heads, **named: asked.append((of_heads, named)) or own(*of_heads, **named),
    )
    for mask in (allowed, torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)):
        found, _ = attention_by_rows(MODULE, *given, mask if masked else None, scaling=0.5)
        _, expected = by_definition(given, allowed, 0.5)
        torch.testing.assert_close(found.double(), expected, rtol=0.02 if dtype is torch.bfloat16 else 1e-5, atol=1e-5)
    for (_, key, value), named in asked:
        assert key is given[1] and value is given[2] and not named.get("enable_gqa")


def test_one_new_token_under_a_mask_of_each_head_is_transformers_own():
    given = [part.detach() for part in heads(2, 45)]
    given[0] = given[0][:, :, -1:]
    mask = torch.rand(2, 4, 1, 45, generator=torch.Generator().manual_seed(1)) > 0.5
    found, _ = attention_by_rows(MODULE, *given, mask)
    torch.testing.assert_close(found.double(), by_definition(given, mask, 0.25)[1], rtol=0.02, atol=1e-3)


def test_a_scale_of_the_model_s_own():
    given = heads(1, 45)
    found, _ = attention_by_rows(MODULE, *given, None, scaling=0.5)
    assert_exact_to_the_last_bit(found, given, within_rows([45]), scale=0.5)


def test_torch_s_transforms_of_functions_take_its_gradient_too():
    given = heads(1, 45)
    along = torch.randn(1, 45, 4, 16, dtype=torch.bfloat16)

    def through(query: Tensor) -> Tensor:
        return (attention_by_rows(MODULE, query, *given[1:], None)[0] * along).float().sum()

    expected = torch.autograd.grad(through(given[0]), given[0])[0]
    assert torch.equal(torch.func.grad(through)(given[0].detach()), expected)


def test_a_mask_of_numbers_may_be_of_a_whole_line_and_its_rows_are_not_kept_apart():
    mask = torch.zeros(1, 1, 45, 45)
    with pytest.raises(NotImplementedError, match="under a mask of True and False alone"):
        attention_by_rows(MODULE, *heads(1, 45), mask, row_lengths=[40, 5])
    found, _ = attention_by_rows(MODULE, *heads(1, 45), mask == 0, row_lengths=[40, 5])
    assert found.shape == (1, 45, 4, 16)


def test_what_a_paged_cache_is_given_has_the_model_s_precision(monkeypatch):
    """It is written to in the precision that it has."""
    got = []
    monkeypatch.setattr(attention, "sdpa_attention_forward", lambda _, *given, **__: (got.extend(given), None))
    attention_by_rows(MODULE, *heads(1, 45), None, cache=object())
    assert [part.dtype for part in got[:3]] == [torch.bfloat16] * 3


@pytest.fixture
def precision():
    """torch's settings of products in float32: of oneDNN as a whole, and of its products."""
    settings = torch.backends.mkldnn, torch.backends.mkldnn.matmul
    yield settings
    for setting in settings:
        setting.fp32_precision = "none"


@pytest.mark.parametrize("own", ["ieee", "none"])
def test_products_elsewhere_stay_as_they_were(own, precision):
    of_all, of_products = precision
    of_products.fp32_precision = own
    attention_by_rows(MODULE, *heads(1, 45), None)
    assert of_products.fp32_precision == own
    of_all.fp32_precision = "tf32"  # which a setting of its own does not follow
    attention_by_rows(MODULE, *heads(1, 45), None)
    of_all.fp32_precision = "bf16"
    assert of_products.fp32_precision == ("ieee" if own == "ieee" else "bf16")


def test_so_they_do_after_several_threads_at_once(precision):
    given = [part.detach() for part in heads(1, 45)]

    def attend(_: int) -> None:
        for _ in range(50):
            attention_by_rows(MODULE, *given, None)

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(attend, range(3)))
    assert precision[1].fp32_precision == "none"


def test_a_plan_leaves_nothing_behind_that_has_no_numbers():
    lengths = [21, 33, 4, 19]  # of no other test
    with FakeTensorMode(), planned_for_cpu():
        found, _ = attention_by_rows(MODULE, *heads(1, sum(lengths)), None, row_lengths=lengths)
        assert found.shape == (1, sum(lengths), 4, 16)
    given = heads(1, sum(lengths))
    found, _ = attention_by_rows(MODULE, *given, None, row_lengths=lengths)
    assert_exact_to_the_last_bit(found, given, within_rows(lengths))


def test_where_a_card_has_no_flash_attention_each_head_has_its_own_keys(monkeypatch):
    """torch's other kernels of a card know no heads that share keys: it would take the one that keeps all products."""
    given = [part.detach().float() for part in heads(2, 45)]
    expected, _ = sdpa_attention_forward(MODULE, *given, None)
    seen = []

    def noted(module, query, key, value, *arguments, **named):
        seen.append((key.shape[1], value.shape[1]))
        return sdpa_attention_forward(module, query, key, value, *arguments, **named)

    monkeypatch.setattr(attention, "sdpa_attention_forward", noted)
    monkeypatch.setattr(attention, "_is_without_flash", lambda query: True)
    found, _ = attention_by_rows(MODULE, *given, None)
    torch.testing.assert_close(found, expected)
    mask = torch.ones(45, 45, dtype=torch.bool).tril()[None, None]
    torch.testing.assert_close(attention_by_rows(MODULE, *given, mask)[0], expected)
    attention_by_rows(MODULE, *given, None, row_lengths=None, cache=object())
    assert seen == [(4, 4), (2, 2), (2, 2)]  # with a mask transformers does so itself


@pytest.mark.parametrize(("dtype", "autocast", "capability", "without"), [
    (torch.float32, None, (9, 0), True),
    (torch.float32, torch.bfloat16, (9, 0), False),
    (torch.bfloat16, None, (8, 0), False),
    (torch.float16, None, (7, 5), True),
])  # fmt: skip
def test_flash_attention_is_of_16_bits_and_newer_cards(dtype, autocast, capability, without, monkeypatch):
    attention._has_flash.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda card: capability)
    monkeypatch.setattr(attention, "computed_in", lambda query: autocast or query.dtype)  # a card's, which is not here
    with FakeTensorMode():
        query = torch.empty(1, 4, 8, 16, dtype=dtype, device="cuda")
        with monkeypatch.context() as patch:
            patch.setattr(attention, "Tensor", type(query))  # as real ones are
            assert attention._is_without_flash(query) is without
        assert attention._is_without_flash(query) is without  # planned for a card of which the precision is known
    assert not attention._is_without_flash(torch.empty(1, 4, 8, 16, dtype=dtype))
    attention._has_flash.cache_clear()
