"""The families of transformers, by model_type, whose tiny random models patch.hf was seen to cover, with packed rows
equal to rows alone, and of the others what stood in the way first. Written by tests/patch/test_covered.py, which holds
it; nothing decides by it what is patched.

Where a configuration asks for the rope type longrope (of Phi-3 those of a long context), patch.hf and the engine want
the choice of its factors: longrope="short" or "long"; of the type dynamic (InternLM3's) "short"."""

WITH_IMAGES = ("qwen2_5_vl", "qwen3_5", "qwen3_vl", "qwen3_vl_moe")  # their conditional-generation classes

COVERED = (
    "arcee",
    "axk1",
    "biogpt",
    "bitnet",
    "cohere",
    "cohere2",
    "cohere2_moe",
    "ctrl",
    "cwm",
    "deepseek_v3",
    "dots1",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone",
    "exaone4",
    "exaone_moe",
    "flex_olmo",
    "flint",
    "fuyu",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt-sw3",
    "gpt2",
    "gpt_bigcode",
    "gpt_neox",
    "gpt_oss",
    "granite",
    "granite_swa",
    "granitemoe",
    "granitemoe_swa",
    "granitemoeshared",
    "helium",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "hy_v3",
    "hyperclovax",
    "internlm3",
    "iquestcoder",
    "jais2",
    "lara_mini",
    "llama",
    "mellum",
    "mimo_v2_flash",
    "minicpm3",
    "minimax_m2",
    "ministral",
    "mistral",
    "mixtral",
    "nemotron",
    "olmo",
    "olmo2",
    "olmo3",
    "olmo_hybrid",
    "olmoe",
    "persimmon",
    "phi",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_moe",
    "qwen3_next",
    "sarvam_mla",
    "sarvam_moe",
    "seed_oss",
    "smollm3",
    "solar_open",
    "stablelm",
    "starcoder2",
    "vaultgemma",
    "youtu",
)
REFUSED = {
    "afmoe": "AfmoeSparseMoeBlock: it holds parameters that no aligned op covers",
    "apertus": "XIELUActivation: it holds parameters that no aligned op covers",
    "apertus1p5_text": "XIELUActivation: it holds parameters that no aligned op covers",
    "aria_text": "AriaExperts: its forward does something else than what it looks like: it raises on small tensors",
    "axk2": "AXK2Indexer: runs aten.bmm, aten.topk outside the aligned ops",
    "bailing_hybrid": "Conv1d: no module of transformers, and none of torch's that an aligned op covers",
    "bamba": "not tried: the sizes of tests/patch/families.py make no small model of it",
    "bart": "not tried: the sizes of tests/patch/families.py make no small model of it",
    "beam": "BeamModel: runs aten.exp, aten.log1p outside the aligned ops",
    "bert": (
        "model: got BertLMHeadModel (of bert, cls), expected a decoder, or a causal language model of a "
        "decoder and an output layer"
    ),
    "bert-generation": (
        "model: got BertGenerationDecoder (of bert, lm_head), expected a decoder, or a causal language model "
        "of a decoder and an output layer"
    ),
    "big_bird": (
        "model: got BigBirdForCausalLM (of bert, cls), expected a decoder, or a causal language model of a "
        "decoder and an output layer"
    ),
    "bigbird_pegasus": "not tried: the sizes of tests/patch/families.py make no small model of it",
    "blenderbot": "not tried: the sizes of tests/patch/families.py make no small model of it",
    "blenderbot-small": (
        "BlenderbotSmallForCausalLM: it is more than a decoder and an output layer: its forward reads "
        "'decoder' of its BlenderbotSmallDecoderWrapper"
    ),
    "bloom": "BloomModel: it does not run on a small batch (ValueError: too many values to unpack (expected 2))",
    "blt": "not tried: the sizes of tests/patch/families.py make no small model of it",
    "camembert": (
        "model: got CamembertForCausalLM (of lm_head, roberta), expected a decoder, or a causal language "
        "model of a decoder and an output layer"
    ),
    "codegen": (
        "CodeGenAttention: apply_rotary_pos_emb takes other arguments than cos, k, position_ids, q, sin, unsqueeze_dim"
    ),
    "cohere_compass_text": "not tried: the sizes of tests/patch/families.py make no small model of it",
    "cpmant": "CpmAntSegmentPositionEmbedding: it holds parameters that no aligned op covers",
    "data2vec-text": (
        "model: got Data2VecTextForCausalLM (of data2vec_text, lm_head), expected a decoder, or a causal "
        "language model of a decoder and an output layer"
    ),
    "dbrx": "not tried: the sizes of tests/patch/families.py make no small model of it",
    "deepseek_v2": "DeepseekV2RotaryEmbedding: a rotary embedding whose tables no aligned op computes",
    "deepseek_v32": "DeepseekV32Indexer: runs aten.bmm, aten.topk outside the aligned ops",
    "deepseek_v4": (
        "DeepseekV4Attention: apply_rotary_pos_emb takes other arguments than cos, k, position_ids, q, sin, "
        "unsqueeze_dim"
    ),
    "diffllama": "RMSNorm: not a layer norm that an aligned op computes",
    "doge": "DogeDecoderLayer: it holds parameters that no aligned op covers",
    "dory": "DoryDecoderLayer: it holds parameters that no aligned op covers",
    "dots3_note": "not tried: the sizes of tests/patch/families.py make no small model of it",
    "dots3_note_text": "not tried: the sizes of tests/patch/families.py make no small model of it",
    "electra": (
        "model: got ElectraForCausalLM (of electra, generator_predictions, generator_lm_head), expected a "
        "decoder, or a causal language model of a decoder and an output layer"
    ),
    "emu3": "not tried: the sizes of tests/patch/families.py make no small model of it",
    "ernie": (
        "model: got ErnieForCausalLM (of ernie, cls), expected a decoder, or a causal language model of a "
        "decoder and an output layer"
    ),
    "falcon": "not tried: the sizes of tests/patch/families.py make no small model of it",
    "falcon_h1": (
        "FalconH1ForCausalLM: it is more than a decoder and an output layer: its forward reads "
        "'lm_head_multiplier' of its FalconH1Model"
    ),
    "falcon_mamba": "FalconMambaMixer: it holds parameters that no aligned op covers",
    "gemma3": "not tried: the sizes of tests/patch/families.py make no small model of it",
    "gemma3n": "not tried: the sizes of tests/patch/families.py make no small model of it",
    "gemma3n_text": "not tried: the sizes of tests/patch/families.py make no small model of it",
    "gemma4": "not tried: the sizes of tests/patch/families.py make no small model of it",
    "gemma4_assistant": "not tried: the sizes of tests/patch/families.py make no small model of it",
    "gemma4_text": "not tried: the sizes of tests/patch/families.py make no small model of it",
    "gemma4_unified": (
        "Gemma4UnifiedForConditionalGeneration: it is more than a decoder and an output layer: its forward "
        "reads 'shared_kv_states' of its Gemma4UnifiedModel's output"
    ),
    "gemma4_unified_assistant": "not tried: the sizes of tests/patch/families.py make no small model of it",
    "gemma4_unified_text": (
        "Gemma4UnifiedForCausalLM: it is more than a decoder and an output layer: its forward reads "
        "'shared_kv_states' of its Gemma4UnifiedTextModel's output"
    ),
    "git": "not tried: the sizes of tests/patch/families.py make no small model of it",
    "glm_moe_dsa": "GlmMoeDsaIndexer: runs aten.bmm, aten.topk outside the aligned ops",
    "got_ocr2": "not tried: the sizes of tests/patch/families.py make no small model of it",
    "gpt_neo": "not tried: the sizes of tests/patch/families.py make no small model of it",
    "gpt_neox_japanese": "GPTNeoXJapaneseAttention: it holds parameters that no aligned op covers",
    "gptj": (
        "GPTJAttention: apply_rotary_pos_emb takes other arguments than cos, k, position_ids, q, sin, unsqueeze_dim"
    ),
    "granitemoehybrid": "not tried: the sizes of tests/patch/families.py make no small model of it",
    "hrm_text": "HrmTextRMSNorm: runs aten.mean, aten.rsqrt outside the aligned ops",
    "hy_v4": "HYV4HyperConnection: it holds parameters that no aligned op covers",
    "inkling2_loop_text": "not tried: the sizes of tests/patch/families.py make no small model of it",
    "inkling2_text": "not tried: the sizes of tests/patch/families.py make no small model of it",
    "inkling_text": "InklingForCausalLM: it multiplies the logits by 0.0416667, which its config does not name",
    "jamba": "JambaMambaMixer: it holds parameters that no aligned op covers",
    "jetmoe": "JetMoeMoE: it holds parameters that no aligned op covers",
    "kimi_linear": "not tried: the sizes of tests/patch/families.py make no small model of it",
    "kolibri1": "Kolibri1TopKRouter: a router whose scores or choice no aligned op computes",
    "laguna": "LagunaAttention: runs aten.softplus outside the aligned ops",
    "lfm2": "Lfm2MLP: runs aten.silu outside the aligned ops",
    "lfm2_moe": "not tried: the sizes of tests/patch/families.py make no small model of it",
    "lfm3": "Conv1d: no module of transformers, and none of torch's that an aligned op covers",
    "llama4": "Llama4TextExperts: its forward takes other arguments (hidden_states) than what an aligned op replaces",
    "llama4_text": (
        "Llama4TextExperts: its forward takes other arguments (hidden_states) than what an aligned op replaces"
    ),
    "longcat_flash": (
        "LongcatFlashExperts: experts whose activation (SiLUActivation, Identity) or form no aligned op "
        "computes: expected silu or gelu_tanh"
    ),
    "mamba": "MambaMixer: it holds parameters that no aligned op covers",
    "mamba2": "not tried: the sizes of tests/patch/families.py make no small model of it",
    "marian": "not tried: the sizes of tests/patch/families.py make no small model of it",
    "mbart": "not tried: the sizes of tests/patch/families.py make no small model of it",
    "megatron-bert": (
        "model: got MegatronBertForCausalLM (of bert, cls), expected a decoder, or a causal language model of"
        " a decoder and an output layer"
    ),
    "minimax": "MiniMaxLightningAttention: runs aten.bmm, aten.exp outside the aligned ops",
    "minimax_m3_vl_text": (
        "MiniMaxM3VLExperts: experts whose activation or form no aligned op computes: expected silu or gelu_tanh"
    ),
    "ministral3": "Ministral3Attention: runs aten.floor, aten.log outside the aligned ops",
    "mllama": "not tried: the sizes of tests/patch/families.py make no small model of it",
    "modernbert-decoder": (
        "model: got ModernBertDecoderForCausalLM (of model, lm_head, decoder), expected a decoder, or a "
        "causal language model of a decoder and an output layer"
    ),
    "moshi": (
        "MoshiAttention: its mask has a window of 3000, but it asks attention for None: sliding_window and "
        "layer_types of the config say what masks and caches of transformers have: set them to what its "
        "attention asks for"
    ),
    "moss_transcribe_diarize": "not tried: the sizes of tests/patch/families.py make no small model of it",
    "mpt": "MptModel: runs aten.pow, aten.reciprocal outside the aligned ops",
    "musicgen": "not tried: the sizes of tests/patch/families.py make no small model of it",
    "musicgen_melody": "not tried: the sizes of tests/patch/families.py make no small model of it",
    "mvp": "not tried: the sizes of tests/patch/families.py make no small model of it",
    "nanochat": "NanoChatAttention: apply_rotary_pos_emb rotates in a way that no aligned op computes",
    "nemotron_h": "NemotronHMamba2Mixer: it holds parameters that no aligned op covers",
    "openai-gpt": (
        "OpenAIGPTModel: its forward takes a cache by none of the names that are known here: cache, past_key_values"
    ),
    "opt": "OPTForCausalLM: it is more than a decoder and an output layer: its forward reads 'decoder' of its OPTModel",
    "pegasus": "not tried: the sizes of tests/patch/families.py make no small model of it",
    "phi4_multimodal": "not tried: the sizes of tests/patch/families.py make no small model of it",
    "phimoe": "PhimoeTopKRouter: a linear layer with a forward or a parametrization of its own",
    "plbart": "not tried: the sizes of tests/patch/families.py make no small model of it",
    "prophetnet": "not tried: the sizes of tests/patch/families.py make no small model of it",
    "qwen4_exp": "Qwen4ExpTextRMSNorm: not a root-mean-square norm that an aligned op computes",
    "qwen4_exp_text": "Qwen4ExpTextRMSNorm: not a root-mean-square norm that an aligned op computes",
    "recurrent_gemma": "RecurrentGemmaForCausalLM: it does something to the logits that no aligned op computes",
    "reformer": "not tried: the sizes of tests/patch/families.py make no small model of it",
    "rembert": (
        "model: got RemBertForCausalLM (of rembert, cls), expected a decoder, or a causal language model of a"
        " decoder and an output layer"
    ),
    "roberta": (
        "model: got RobertaForCausalLM (of roberta, lm_head), expected a decoder, or a causal language model "
        "of a decoder and an output layer"
    ),
    "roberta-prelayernorm": (
        "model: got RobertaPreLayerNormForCausalLM (of roberta_prelayernorm, lm_head), expected a decoder, or"
        " a causal language model of a decoder and an output layer"
    ),
    "roc_bert": "not tried: the sizes of tests/patch/families.py make no small model of it",
    "roformer": (
        "model: got RoFormerForCausalLM (of roformer, cls), expected a decoder, or a causal language model of"
        " a decoder and an output layer"
    ),
    "rwkv": (
        "RwkvForCausalLM: it is more than a decoder and an output layer: its forward reads 'state' of its "
        "RwkvModel's output"
    ),
    "trocr": (
        "TrOCRForCausalLM: it is more than a decoder and an output layer: its forward reads 'decoder' of its "
        "TrOCRDecoderWrapper"
    ),
    "whisper": "not tried: the sizes of tests/patch/families.py make no small model of it",
    "xglm": (
        "XGLMAttention: it does not run on a small batch (ValueError: Attention mask should be of size (2, 1,"
        " 3, 3), but is torch.Size([1, 1, 1, 1]))"
    ),
    "xlm": (
        "model: got XLMWithLMHeadModel (of transformer, pred_layer), expected a decoder, or a causal language"
        " model of a decoder and an output layer"
    ),
    "xlm-roberta": (
        "model: got XLMRobertaForCausalLM (of lm_head, roberta), expected a decoder, or a causal language "
        "model of a decoder and an output layer"
    ),
    "xlm-roberta-xl": (
        "model: got XLMRobertaXLForCausalLM (of roberta, lm_head), expected a decoder, or a causal language "
        "model of a decoder and an output layer"
    ),
    "xlnet": "not tried: the sizes of tests/patch/families.py make no small model of it",
    "xlstm": "xLSTMForCausalLM: it does something to the logits that no aligned op computes",
    "xmod": (
        "model: got XmodForCausalLM (of roberta, lm_head), expected a decoder, or a causal language model of "
        "a decoder and an output layer"
    ),
    "zamba": "not tried: the sizes of tests/patch/families.py make no small model of it",
    "zamba2": "not tried: the sizes of tests/patch/families.py make no small model of it",
    "zaya": "not tried: the sizes of tests/patch/families.py make no small model of it",
}
