"""Tiny models of transformers' own classes: dense, mixtures, hybrids, encoders, vision, audio, several modalities."""

from .models import transformers

D = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, vocab_size=80)
KV = D | dict(num_key_value_heads=2, pad_token_id=0)
MOE = KV | dict(moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2)
VISION = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, image_size=32,
              patch_size=16)  # fmt: skip
MLA = dict(kv_lora_rank=32, q_lora_rank=48, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16)
T5 = dict(vocab_size=80, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_decoder_layers=2, num_heads=4,
          decoder_start_token_id=0)  # fmt: skip
TEXT = dict(model_type="llama", **KV)
SEQ = dict(d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
           encoder_ffn_dim=96, decoder_ffn_dim=96, vocab_size=80, pad_token_id=0, bos_token_id=1, eos_token_id=2,
           decoder_start_token_id=1)  # fmt: skip
AUDIO = dict(conv_dim=(64, 64), conv_stride=(5, 2), conv_kernel=(10, 3), num_conv_pos_embeddings=16,
             num_conv_pos_embedding_groups=4)  # fmt: skip

# class → (its config, sizes)
MODELS = {
    "LlamaForCausalLM": ("LlamaConfig", KV),
    "Qwen3ForCausalLM": ("Qwen3Config", KV | dict(head_dim=16, tie_word_embeddings=True)),
    "Qwen2ForCausalLM": ("Qwen2Config", KV),
    "MistralForCausalLM": ("MistralConfig", KV),
    "Gemma2ForCausalLM": ("Gemma2Config", KV | dict(head_dim=16)),
    "Phi3ForCausalLM": ("Phi3Config", KV),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", D),
    "BloomForCausalLM": ("BloomConfig", dict(vocab_size=80, hidden_size=64, n_layer=2, n_head=4)),
    "OPTForCausalLM": ("OPTConfig", dict(vocab_size=80, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
                                         ffn_dim=96, word_embed_proj_dim=64)),
    "Qwen3MoeForCausalLM": ("Qwen3MoeConfig", MOE | dict(head_dim=16)),
    "MixtralForCausalLM": ("MixtralConfig", KV | dict(num_local_experts=4, num_experts_per_tok=2)),
    "OlmoeForCausalLM": ("OlmoeConfig", KV | dict(num_experts=4, num_experts_per_tok=2)),
    "DeepseekV3ForCausalLM": ("DeepseekV3Config", KV | MLA | dict(
        moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1,
        first_k_dense_replace=1, num_key_value_heads=4)),
    "GptOssForCausalLM": ("GptOssConfig", KV | dict(head_dim=16, intermediate_size=32, num_local_experts=4,
                                                    num_experts_per_tok=2)),
    "Qwen3NextForCausalLM": ("Qwen3NextConfig", MOE | dict(
        head_dim=16, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=16,
        linear_value_head_dim=16, shared_expert_intermediate_size=32,
        layer_types=["linear_attention", "full_attention"])),
    "Gemma4ForCausalLM": ("Gemma4TextConfig", KV | dict(
        head_dim=16, global_head_dim=16, enable_moe_block=True, num_experts=4, top_k_experts=2,
        moe_intermediate_size=32, vocab_size_per_layer_input=80, hidden_size_per_layer_input=16,
        num_kv_shared_layers=0, layer_types=["sliding_attention", "full_attention"])),
    "MambaForCausalLM": ("MambaConfig", dict(vocab_size=80, hidden_size=64, num_hidden_layers=2, state_size=8)),
    "Mamba2ForCausalLM": ("Mamba2Config", dict(vocab_size=80, hidden_size=64, num_hidden_layers=2, state_size=16,
                                               head_dim=16, num_heads=8, n_groups=1, expand=2)),
    "JambaForCausalLM": ("JambaConfig", KV | dict(num_experts=4, num_experts_per_tok=2, attn_layer_period=2,
                                                  attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1,
                                                  mamba_d_state=8, mamba_dt_rank=16, use_mamba_kernels=False)),
    "NemotronHForCausalLM": ("NemotronHConfig", KV | dict(
        layers_block_type=["mamba", "attention", "moe"], num_hidden_layers=3, mamba_num_heads=8, mamba_head_dim=16,
        ssm_state_size=16, n_groups=1, head_dim=16, n_routed_experts=4, moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=32, num_experts_per_tok=2, use_mamba_kernels=False)),
    "BertForMaskedLM": ("BertConfig", D),
    "BertForSequenceClassification": ("BertConfig", D),
    "RobertaForTokenClassification": ("RobertaConfig", D),
    "ModernBertForMaskedLM": ("ModernBertConfig", D | dict(pad_token_id=0, cls_token_id=1, sep_token_id=2)),
    "LlamaForSequenceClassification": ("LlamaConfig", KV),
    "T5ForConditionalGeneration": ("T5Config", T5),
    "BartForConditionalGeneration": ("BartConfig", SEQ),
    "ViTForImageClassification": ("ViTConfig", VISION),
    "Wav2Vec2ForCTC": ("Wav2Vec2Config", D | AUDIO),
    "WhisperForConditionalGeneration": ("WhisperConfig", SEQ),
    "CLIPModel": ("CLIPConfig", dict(
        text_config=D | dict(num_hidden_layers=1), vision_config=VISION, projection_dim=64)),
    "LlavaForConditionalGeneration": ("LlavaConfig", dict(
        text_config=TEXT, vision_config=dict(model_type="clip_vision_model", **VISION), image_token_index=9)),
    "Qwen2_5_VLForConditionalGeneration": ("Qwen2_5_VLConfig", dict(
        text_config=KV | dict(rope_scaling=dict(type="default", mrope_section=[2, 3, 3])),
        vision_config=dict(depth=2, hidden_size=64, num_heads=4, intermediate_size=96, out_hidden_size=64))),
}  # fmt: skip


def build(name):
    """A model of that class with random weights, in BF16."""
    t = transformers()
    import torch

    config, sizes = MODELS[name]
    torch.manual_seed(0)
    return getattr(t, name)(getattr(t, config)(**sizes)).to(torch.bfloat16).eval()
