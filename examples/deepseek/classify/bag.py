"""A linear layer over the tokens of a text and over pairs and triples of neighbouring tokens."""

from __future__ import annotations

from torch import Tensor, nn

ROWS = 1 << 16  # of pairs, and of triples; there are more of them than rows, so they are hashed
_FACTORS = (40503, 2654435, 97531)  # of the hash function
_SCALE = 30.0  # a token is in few texts, so its row must learn faster than weights that all texts use


class Bag(nn.Module):
    """Scores by tokens, initially zero, so that the transformer alone decides at first."""

    def __init__(self, vocabulary: int, classes: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, classes)
        self.pairs, self.triples = nn.Embedding(ROWS, classes), nn.Embedding(ROWS, classes)
        for table in (self.tokens, self.pairs, self.triples):
            nn.init.zeros_(table.weight)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        token_mask = mask[:, :, None].to(self.tokens.weight.dtype)  # padding is on the left
        scores = (self.tokens(ids) * token_mask).sum(dim=1)
        for length, table in ((2, self.pairs), (3, self.triples)):
            windows = ids.shape[1] - length + 1
            rows = sum(ids[:, i : i + windows] * _FACTORS[i] for i in range(length)) % ROWS
            scores = scores + (table(rows) * token_mask[:, :windows]).sum(dim=1)
        logits: Tensor = _SCALE * scores / token_mask.sum(dim=1).sqrt()
        return logits
