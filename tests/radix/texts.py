"""Short random texts over few pages, so that prefixes overlap at every depth."""

from random import Random

__all__ = ["Text", "Texts"]

Text = tuple[int, ...]


class Texts:
    """Draws texts, some behind a public prefix or a part of it, and the namespaces they are in."""

    def __init__(self, page_size: int, public: list[Text], spaces: list[str]) -> None:
        self.page_size, self.public, self.spaces = page_size, public, spaces

    def draw(self, random: Random) -> Text:
        text: Text = ()
        if self.public and random.random() < 0.6:
            text = random.choice(self.public)
            text = text[: random.randint(0, len(text))] if random.random() < 0.3 else text
        for _ in range(random.randint(0, 5)):
            page = [random.randint(1, 2)] * self.page_size
            if random.random() < 0.2:
                page[random.randrange(self.page_size)] = 9
            text += tuple(page)
        cut = random.randint(0, self.page_size - 1) if random.random() < 0.3 else 0
        return text[: len(text) - cut]

    def draw_space(self, random: Random) -> str:
        return random.choice(self.spaces)
