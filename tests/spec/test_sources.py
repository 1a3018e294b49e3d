import torch
from bitsandbytes.nn import Linear4bit

from tests.tiny_models import doubling, tiny_model
from tests.trainers.helpers import own_classifier
from toolkit.models import META, SharedBase, save_model, train_in_float32
from toolkit.models.lora import trained_copy
from toolkit.spec.sources import OwnBase, Site


def test_a_reward_on_a_16_bit_base_of_its_own_comes_back_with_the_head_that_was_trained(tmp_path):
    tokenizer = doubling.tokenizer()
    for saved in (tiny_model("llama"), tokenizer):
        saved.save_pretrained(tmp_path / "base")
    own = {"model": str(tmp_path / "base"), "dtype": "bfloat16"}
    source = OwnBase(
        "reward", "reward_model", section="reward_model", model=own, lora={"r": 4, "target_modules": ["q_proj"]}
    )
    site = Site(tokenizer, lambda stage: tmp_path / "out")
    trained = source.classifier(site)
    train_in_float32(trained)
    head = trained_copy(trained.get_base_model().score).weight
    torch.nn.init.normal_(head, generator=torch.Generator().manual_seed(1))
    assert not torch.equal(head, head.bfloat16().float())
    save_model(trained, tokenizer, tmp_path / "out" / "model")
    loaded = source.trained_classifier(site)
    assert torch.equal(trained_copy(loaded.get_base_model().score).weight, head)


def test_a_critic_from_a_trained_model_is_of_no_revision(tmp_path):
    """Which the reward model has on the hub, not the folder that the reward stage has written."""
    tokenizer = doubling.tokenizer()
    own = {"model": "some/reward", "revision": "abc", "dtype": "float32"}
    source = OwnBase("value", "start.value", section="reward_model", model=own, stage="reward")
    for saved in (tiny_model("llama"), tokenizer):
        saved.save_pretrained(tmp_path / "out" / "model")
    placed = source.place(SharedBase(tiny_model("llama")), Site(tokenizer, lambda stage: tmp_path / "out"))
    assert "a copy of the reward model" in str(placed)


def test_a_trained_reward_model_is_of_no_revision_either(tmp_path):
    tokenizer, made = doubling.tokenizer(), own_classifier("llama")
    for saved in (made, tokenizer):
        saved.save_pretrained(tmp_path / "out" / "model")
    own = {"model": "some/reward", "revision": "abc", "dtype": "float32"}
    source = OwnBase("reward", "reward_model", section="reward_model", model=own)
    trained = source.trained_classifier(Site(tokenizer, lambda stage: tmp_path / "out"))
    assert torch.equal(trained.score.weight, made.score.weight)


def test_the_outline_of_a_reward_model_in_4_bits_is_in_4_bits(tmp_path):
    tokenizer = doubling.tokenizer()
    for saved in (tiny_model("llama"), tokenizer):
        saved.save_pretrained(tmp_path / "base")
    nf4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    own = {"model": str(tmp_path / "base"), "dtype": "bfloat16", "quantization": nf4}
    lora = {"r": 4, "target_modules": ["q_proj"]}
    source = OwnBase("reward", "reward_model", section="reward_model", model=own, lora=lora)
    outline = source.classifier(Site(tokenizer, lambda stage: None), device=META)
    assert any(isinstance(module, Linear4bit) for module in outline.modules())
