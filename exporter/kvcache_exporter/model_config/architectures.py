"""Which reader knows which architecture. To add one: write a reader if no design here fits, and a row below."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvcache_exporter.model_config import attention, encoder_decoder, latent, states
from kvcache_exporter.model_config.fields import Fields
from kvcache_exporter.model_config.layers import DecoderLayer


@dataclass(frozen=True)
class Architecture:
    """How the layers of one architecture are read, and what its class in vLLM does otherwise than most.

    `model_types` are Hugging Face's names for it, for files (and nested parts) that name no architecture. `draft_layer` reads the
    multi-token-prediction layer that the checkpoint carries. `honours_kv_cache_dtype` is False where vLLM's class passes no cache
    settings to its attention, `derives_head_dim` is True where it divides the width by the heads whatever size of a head the file
    states. `ssm_dtype_field` is where the file gives the dtype of recurrent states, `ssm_dtype` that dtype where nothing does.
    `has_prefill_checkpoint` tells a mixer that keeps one more state with prefix caching. `own_fields` are fields of its own that
    would make any other reader wrong.
    """

    reader: Callable[[Fields], tuple[DecoderLayer, ...]]
    model_types: tuple[str, ...] = ()
    draft_layer: Callable[[Fields], DecoderLayer] | None = None
    honours_kv_cache_dtype: bool = True
    derives_head_dim: bool = False
    ssm_dtype: str | None = None
    ssm_dtype_field: str | None = None
    has_prefill_checkpoint: bool = False
    own_fields: frozenset[str] = frozenset()


def _last_attention_layer(reader: Callable[[Fields], tuple[DecoderLayer, ...]]) -> Callable[[Fields], DecoderLayer]:
    """A draft layer of the same attention as the model's last layer that has any."""
    return lambda fields: next(layer for layer in reversed(reader(fields)) if layer)


def _plain(*model_types: str, derives_head_dim: bool = False) -> Architecture:
    return Architecture(attention.attention_decoder, model_types, derives_head_dim=derives_head_dim)


def _uniform(*model_types: str, derives_head_dim: bool = False) -> Architecture:
    return Architecture(attention.uniform_decoder, model_types, derives_head_dim=derives_head_dim)


def _switched(*model_types: str, derives_head_dim: bool = False) -> Architecture:
    return Architecture(attention.switched_window_decoder, model_types, derives_head_dim=derives_head_dim)


def _latent(*model_types: str) -> Architecture:
    return Architecture(latent.latent_decoder, model_types, draft_layer=latent.latent_draft_layer)


def _delta_net(*model_types: str, ssm_dtype_field: str | None = None) -> Architecture:
    return Architecture(
        states.gated_delta_net_decoder,
        model_types,
        draft_layer=_last_attention_layer(states.gated_delta_net_decoder),
        ssm_dtype_field=ssm_dtype_field,
    )


ARCHITECTURES: Mapping[str, Architecture] = {
    # attention with keys and values, full unless the file gives a window
    "ApertusForCausalLM": _plain("apertus"),
    "ArceeForCausalLM": _plain("arcee"),
    "BaiChuanForCausalLM": _plain(),
    "BaichuanForCausalLM": _plain("baichuan"),
    "BloomForCausalLM": _plain("bloom", derives_head_dim=True),
    "ChatGLMForConditionalGeneration": Architecture(attention.chatglm_decoder, derives_head_dim=True),
    "ChatGLMModel": Architecture(attention.chatglm_decoder, ("chatglm",), derives_head_dim=True),
    "CohereForCausalLM": _uniform("cohere"),
    "Dots1ForCausalLM": _plain("dots1"),
    "Ernie4_5ForCausalLM": _plain("ernie4_5"),
    "Ernie4_5_MoeForCausalLM": _uniform("ernie4_5_moe"),
    "ExaoneForCausalLM": _uniform("exaone"),
    "Exaone4ForCausalLM": Architecture(attention.exaone4_decoder, ("exaone4",)),
    "GPT2LMHeadModel": _plain("gpt2", derives_head_dim=True),
    "GPTBigCodeForCausalLM": _plain("gpt_bigcode"),
    "GPTJForCausalLM": _plain("gptj", derives_head_dim=True),
    "GPTNeoXForCausalLM": _plain("gpt_neox"),
    "GemmaForCausalLM": _uniform("gemma"),
    "Glm4ForCausalLM": _uniform("glm4"),
    "Glm4MoeForCausalLM": Architecture(
        attention.attention_decoder, ("glm4_moe",), draft_layer=_last_attention_layer(attention.attention_decoder)
    ),
    "Glm4vForConditionalGeneration": _uniform("glm4v", "glm4v_text"),
    "Glm4vMoeForConditionalGeneration": _uniform("glm4v_moe", "glm4v_moe_text"),
    "GlmForCausalLM": _plain("glm"),
    "GraniteForCausalLM": _plain("granite"),
    "GraniteMoeForCausalLM": _plain("granitemoe", derives_head_dim=True),
    "HunYuanDenseV1ForCausalLM": _plain("hunyuan_v1_dense"),
    "HunYuanMoEV1ForCausalLM": _plain("hunyuan_v1_moe"),
    "InternLM2ForCausalLM": _uniform("internlm2", derives_head_dim=True),
    "InternLM3ForCausalLM": _plain("internlm3"),
    "InternLMForCausalLM": _plain("internlm"),
    "LlamaForCausalLM": _plain("llama"),
    "MiniMaxM2ForCausalLM": _uniform("minimax_m2"),
    "Ministral3ForCausalLM": _plain("ministral3"),
    "MixtralForCausalLM": _uniform("mixtral"),
    "NemotronForCausalLM": _plain("nemotron"),
    "OPTForCausalLM": _uniform("opt", derives_head_dim=True),
    "Olmo2ForCausalLM": _plain("olmo2"),
    "Olmo3ForCausalLM": Architecture(attention.every_fourth_full_decoder, ("olmo3",)),
    "OlmoForCausalLM": _plain("olmo"),
    "OlmoeForCausalLM": _uniform("olmoe", derives_head_dim=True),
    "OpenELMForCausalLM": _plain("openelm"),
    "PersimmonForCausalLM": _plain("persimmon"),
    "Phi3ForCausalLM": _plain("phi3"),
    "Phi4MMForCausalLM": _plain("phi4mm"),
    "PhiMoEForCausalLM": _uniform("phimoe"),
    "PhiForCausalLM": _plain("phi"),
    "SeedOssForCausalLM": _plain("seed_oss"),
    "SmolLM3ForCausalLM": Architecture(attention.smollm3_decoder, ("smollm3",)),
    "SolarForCausalLM": _uniform("solar"),
    "StableLmForCausalLM": _uniform("stablelm", derives_head_dim=True),
    "Starcoder2ForCausalLM": _plain("starcoder2"),
    "MistralForCausalLM": _plain("mistral"),
    # the window is off unless the switch is on
    "Qwen2ForCausalLM": _switched("qwen2", derives_head_dim=True),
    "Qwen2MoeForCausalLM": Architecture(attention.qwen2_moe_decoder, ("qwen2_moe",), derives_head_dim=True),
    "MiMoForCausalLM": _switched("mimo", derives_head_dim=True),
    "Qwen2_5OmniForConditionalGeneration": _switched("qwen2_5_omni", "qwen2_5_omni_text", derives_head_dim=True),
    "Qwen2_5OmniModel": _switched(),
    "Qwen3OmniMoeForConditionalGeneration": _switched("qwen3_omni_moe", "qwen3_omni_moe_text"),
    "Qwen2VLForConditionalGeneration": _switched("qwen2_vl", "qwen2_vl_text", derives_head_dim=True),
    "Qwen2_5_VLForConditionalGeneration": _switched("qwen2_5_vl", "qwen2_5_vl_text", derives_head_dim=True),
    "Qwen3ForCausalLM": _switched("qwen3"),
    "Qwen3MoeForCausalLM": Architecture(attention.qwen3_moe_decoder, ("qwen3_moe",)),
    "Qwen3VLForConditionalGeneration": Architecture(attention.qwen3_vl_decoder, ("qwen3_vl", "qwen3_vl_text")),
    "Qwen3VLMoeForConditionalGeneration": Architecture(attention.qwen3_vl_decoder, ("qwen3_vl_moe", "qwen3_vl_moe_text")),
    # KV heads in a place of their own
    "FalconForCausalLM": Architecture(attention.falcon_decoder, ("falcon",), honours_kv_cache_dtype=False),
    "DbrxForCausalLM": Architecture(attention.attn_config_decoder, ("dbrx",)),
    "MPTForCausalLM": Architecture(attention.attn_config_decoder, ("mpt",)),
    "DeciLMForCausalLM": Architecture(attention.block_configs_decoder, ("nemotron-nas", "deci")),
    # full and sliding, or full and chunked, in one model
    "Cohere2ForCausalLM": Architecture(attention.cohere2_decoder, ("cohere2",)),
    "Gemma2ForCausalLM": Architecture(attention.alternating_decoder, ("gemma2",)),
    "Gemma3ForCausalLM": Architecture(attention.gemma3_decoder, ("gemma3_text",)),
    "Gemma3ForConditionalGeneration": Architecture(attention.gemma3_decoder, ("gemma3",)),
    "Gemma3nForCausalLM": Architecture(attention.gemma3n_decoder, ("gemma3n_text",)),
    "Gemma3nForConditionalGeneration": Architecture(attention.gemma3n_decoder, ("gemma3n",)),
    "Gemma4ForCausalLM": Architecture(attention.gemma4_decoder, ("gemma4_text",)),
    "Gemma4ForConditionalGeneration": Architecture(attention.gemma4_decoder, ("gemma4",)),
    "GptOssForCausalLM": Architecture(attention.gpt_oss_decoder, ("gpt_oss",)),
    "Llama4ForCausalLM": Architecture(attention.llama4_decoder, ("llama4_text",)),
    "Llama4ForConditionalGeneration": Architecture(attention.llama4_decoder, ("llama4",)),
    "MiMoV2FlashForCausalLM": Architecture(attention.mimo_v2_decoder, ("mimo_v2_flash",)),
    # latents
    "DeepseekForCausalLM": _plain("deepseek", derives_head_dim=True),
    "DeepseekV2ForCausalLM": _latent("deepseek_v2"),
    "DeepseekV3ForCausalLM": _latent("deepseek_v3", "kimi_k2"),
    "DeepseekV32ForCausalLM": _latent("deepseek_v32"),
    "DeepseekV4ForCausalLM": Architecture(
        latent.compressed_latent_decoder, ("deepseek_v4",), own_fields=frozenset({"compress_ratios"})
    ),
    "Glm4MoeLiteForCausalLM": _latent("glm4_moe_lite"),
    "GlmMoeDsaForCausalLM": _latent("glm_moe_dsa"),
    # states beside attention
    "BambaForCausalLM": Architecture(states.bamba_decoder, ("bamba",), has_prefill_checkpoint=True),
    "FalconH1ForCausalLM": Architecture(states.falcon_h1_decoder, ("falcon_h1",), has_prefill_checkpoint=True),
    "GraniteMoeHybridForCausalLM": Architecture(
        states.granite_hybrid_decoder, ("granitemoehybrid",), has_prefill_checkpoint=True
    ),
    "JambaForCausalLM": Architecture(states.jamba_decoder, ("jamba",), derives_head_dim=True),
    "KimiLinearForCausalLM": Architecture(states.kimi_linear_decoder, ("kimi_linear",)),
    "KimiK3ForConditionalGeneration": Architecture(states.kimi_linear_decoder, ("kimi_k3",), has_prefill_checkpoint=True),
    "Lfm2ForCausalLM": Architecture(states.short_conv_decoder, ("lfm2",)),
    "Lfm2MoeForCausalLM": Architecture(states.short_conv_decoder, ("lfm2_moe",)),
    "MiniMaxM1ForCausalLM": Architecture(states.minimax_text_decoder, ("minimax_m1",)),
    "MiniMaxText01ForCausalLM": Architecture(states.minimax_text_decoder, ("minimax_text_01", "minimax")),
    "NemotronHForCausalLM": Architecture(
        states.nemotron_h_decoder,
        ("nemotron_h",),
        ssm_dtype="float32",
        ssm_dtype_field="mamba_ssm_cache_dtype",
        has_prefill_checkpoint=True,
    ),
    "Qwen3NextForCausalLM": _delta_net("qwen3_next"),
    "Qwen3_5ForCausalLM": _delta_net("qwen3_5_text", ssm_dtype_field="mamba_ssm_dtype"),
    "Qwen3_5ForConditionalGeneration": _delta_net("qwen3_5", ssm_dtype_field="mamba_ssm_dtype"),
    "Qwen3_5MoeForCausalLM": _delta_net("qwen3_5_moe_text", ssm_dtype_field="mamba_ssm_dtype"),
    "Qwen3_5MoeForConditionalGeneration": _delta_net("qwen3_5_moe", ssm_dtype_field="mamba_ssm_dtype"),
    "Zamba2ForCausalLM": Architecture(states.zamba2_decoder, ("zamba2",), has_prefill_checkpoint=True),
    # an encoder's output beside the decoder's own
    "MllamaForConditionalGeneration": Architecture(encoder_decoder.mllama_decoder, ("mllama", "mllama_text_model")),
    "WhisperForConditionalGeneration": Architecture(encoder_decoder.whisper_decoder, ("whisper",)),
}

MODEL_TYPES: Mapping[str, str] = {
    model_type: name for name, architecture in ARCHITECTURES.items() for model_type in architecture.model_types
}

MULTIMODAL_WRAPPERS = frozenset(
    {
        "Cohere2VisionForConditionalGeneration",
        "DeepseekVLV2ForCausalLM",
        "InternVLChatModel",
        "InternVLForConditionalGeneration",
        "KimiK25ForConditionalGeneration",
        "KimiVLForConditionalGeneration",
        "Lfm2VlForConditionalGeneration",
        "LlavaForConditionalGeneration",
        "LlavaNextForConditionalGeneration",
        "LlavaOnevisionForConditionalGeneration",
        "Mistral3ForConditionalGeneration",
        "PaliGemmaForConditionalGeneration",
        "PixtralForConditionalGeneration",
    }
)
"""Architectures that add nothing to the cache of the language model inside them; that one is read by its own reader."""
