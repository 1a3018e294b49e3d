import pytest

from toolkit.errors import ModelError
from toolkit.models import load_tokenizer


def test_tokenizer_without_pad_pads_with_eos(tmp_path, tokenizer):
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.pad_token_id == loaded.eos_token_id == 2 and loaded.padding_side == "left"


def test_tokenizer_without_eos_is_refused(tmp_path, tokenizer):
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="has no eos_token"):
        load_tokenizer(str(tmp_path))
