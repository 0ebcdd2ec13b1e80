"""Tokens that end a turn in some family's chat format; few files name them in a key of their own."""

__all__ = ["END_OF_TURN_TOKENS", "written_turn_ends"]

END_OF_TURN_TOKENS = frozenset(
    {
        "<|eot_id|>",
        "<|eom_id|>",
        "<|eot|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|end_of_turn|>",
        "<|endofturn|>",
        "<|END_OF_TURN_TOKEN|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek
    }
)


def written_turn_ends(template: str) -> frozenset[str]:
    """Those that a chat template writes literally."""
    written = frozenset(token for token in END_OF_TURN_TOKENS if token in template)
    if "<|return|>" in written:  # gpt-oss ends messages of one turn by <|end|>
        return written - {"<|end|>"}
    return written
