"""A value other than the default for each field that every configuration has.

transformers' test of configurations takes them from a module that its source distribution leaves out.
"""

config_common_kwargs = {
    "return_dict": False,
    "output_hidden_states": True,
    "output_attentions": True,
    "dtype": "float16",
    "chunk_size_feed_forward": 5,
    "architectures": ["SomeModel"],
    "id2label": {0: "label"},
    "label2id": {"label": "0"},
    "problem_type": "regression",
    "unk_token_id": 5,
    "bos_token_id": 6,
    "pad_token_id": 7,
    "eos_token_id": 8,
    "decoder_start_token_id": 9,
}
