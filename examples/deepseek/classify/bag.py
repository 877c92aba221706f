"""Which tokens a text has, and which pairs and triples of neighbours: a linear layer over all of them."""

from __future__ import annotations

from torch import Tensor, nn

ROWS = 1 << 16  # of pairs, and of triples: there are more of them, so they share rows, but one text has few
_FACTORS = (40503, 2654435, 97531)  # odd numbers that spread neighbours over the rows
_SCALE = 30.0  # few texts have a given token: its row must learn faster than weights that all texts pass through


class Bag(nn.Module):
    """It begins at zero: all that is said at first is what the body says."""

    def __init__(self, vocabulary: int, classes: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, classes)
        self.pairs, self.triples = nn.Embedding(ROWS, classes), nn.Embedding(ROWS, classes)
        for table in (self.tokens, self.pairs, self.triples):
            nn.init.zeros_(table.weight)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        there = mask[:, :, None].to(self.tokens.weight.dtype)  # padding is on the left: after a token there is none
        said = (self.tokens(ids) * there).sum(dim=1)
        for length, table in ((2, self.pairs), (3, self.triples)):
            places = ids.shape[1] - length + 1
            rows = sum(ids[:, i : i + places] * _FACTORS[i] for i in range(length)) % ROWS
            said = said + (table(rows) * there[:, :places]).sum(dim=1)
        scores: Tensor = _SCALE * said / there.sum(dim=1).sqrt()
        return scores
