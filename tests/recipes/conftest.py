from pathlib import Path

import pytest

from tests.recipes.helpers import byte_tokenizer, llama3_tokenizer, save_llama


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """A random Llama with a byte tokenizer and a chat template; pad == eos, as Llama checkpoints ship."""
    return save_llama(tmp_path_factory.mktemp("checkpoint"), byte_tokenizer())


@pytest.fixture(scope="session")
def llama3_checkpoint(tmp_path_factory) -> Path:
    """A random Llama with a tokenizer of Llama 3's shape; the configuration has several ends, as Llama 3.1's."""
    tokenizer = llama3_tokenizer()
    ends = tokenizer.convert_tokens_to_ids(["<|end_of_text|>", "<|eot_id|>"])
    return save_llama(tmp_path_factory.mktemp("llama3"), tokenizer, eos_token_id=ends)
