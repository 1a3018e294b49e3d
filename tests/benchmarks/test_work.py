import pytest
import torch
from transformers import GenerationConfig

from benchmarks.errors import BenchmarkError
from benchmarks.work import PROMPTS, SIZES, Size, Work, given_responses, padding_tokenizer, sample_work, uneven_lengths
from tests.benchmarks.examples import BY_HAND
from tests.tiny_runs import byte_tokenizer, save_llama
from toolkit.data import pad_rows
from toolkit.models import load_base


def test_lengths_go_from_a_sixth_to_all_and_the_first_is_full():
    assert uneven_lengths(4, 12) == [12, 2, 5, 9]  # 2 + 10 · i/3, one further each time
    for size in SIZES.values():
        lengths = uneven_lengths(size.rollouts, size.response_length)
        assert sorted(lengths)[0] == size.response_length // 6
        assert lengths.count(size.response_length) == 1
        assert len(set(lengths)) == min(size.rollouts, size.response_length - size.response_length // 6 + 1)


def test_responses_and_tokens_by_hand():
    assert BY_HAND.responses == [[10, 11, 12, 13], [14, 2]]
    assert BY_HAND.tokens == {"rollout": 6, "score": 14, "update": 28}  # 3 + 5 of prompts, 4 + 2 of responses
    alone = BY_HAND.one_micro_batch()
    assert (alone.responses, alone.size.epochs, alone.size.rollouts) == ([[10, 11, 12, 13]], 1, 1)


def test_a_row_is_found_whatever_it_is_padded_with():
    assert [BY_HAND.row_of([0, 0, 5, 6, 7]), BY_HAND.row_of([8, 9, 5, 6, 8])] == [0, 1]
    with pytest.raises(BenchmarkError, match="a row that is 0 of the prompts"):
        BY_HAND.row_of([1, 2, 3])


def test_another_response_is_refused():
    BY_HAND.check([[10, 11, 12, 13], [14, 2, 99, 99]])  # TRL goes on after the end
    with pytest.raises(BenchmarkError, match="the response to prompt 1 is not the given one"):
        BY_HAND.check([[10, 11, 12, 13], [14, 15, 99, 99]])


def test_the_prompts_are_enough_and_all_different():
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()
    assert len(lines) == len(set(lines)) >= max(size.rollouts for size in SIZES.values())


def test_a_work_comes_back_from_its_file(tmp_path):
    BY_HAND.write(tmp_path / "work.json")
    assert Work.read(tmp_path / "work.json") == BY_HAND


def test_generation_gives_the_responses_and_leaves_the_logits(checkpoint, work):
    model, tokenizer = load_base(checkpoint), padding_tokenizer(checkpoint)
    ids, mask = pad_rows(work.prompt_ids, pad_token_id=tokenizer.pad_token_id, side="left")
    config = GenerationConfig(
        max_new_tokens=10, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, return_dict_in_generate=True,
        output_scores=True, output_logits=True, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    with given_responses(model, work):
        found = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
    work.check(found.sequences[:, ids.shape[1] :].tolist())
    assert torch.equal(torch.stack(found.scores), torch.stack(found.logits))
    assert torch.multinomial.__name__ == "multinomial"  # and torch is as it was


def test_prompts_that_are_apart_are_two_questions_without_a_template(checkpoint):
    tokenizer = padding_tokenizer(checkpoint)
    size = Size(rollouts=2, response_length=3, micro_batch=1, apart=True)
    work = sample_work(load_base(checkpoint), tokenizer, size, prompts=["One?", "Two?", "Three?"])
    assert tokenizer.batch_decode(work.prompt_ids) == ["One? Three?", "Two? Two?"]


def test_a_tokenizer_without_a_second_token_to_pad_with_is_refused(tmp_path):
    with pytest.raises(BenchmarkError, match="neither a pad token nor an unk token"):
        padding_tokenizer(str(save_llama(tmp_path, byte_tokenizer())))
