"""The verdict of the gate in a model card: one section between two markers, and figures in the metadata. Pure text."""

from __future__ import annotations

from collections.abc import Mapping

from memguard.errors import RegistryError
from memguard.gates.registries.protocol import Annotation

START, END = "<!-- memguard:start -->", "<!-- memguard:end -->"
METADATA = "memguard"


def verdict_section(note: Annotation, revision: str) -> str:
    """The verdict as markdown between the markers; names the commit that was judged.

    Example:
        >>> print(verdict_section(Annotation("pass", "All 5 rules hold."), "abc123"))
        <!-- memguard:start -->
        **memguard: pass** for revision `abc123`. All 5 rules hold.
        <!-- memguard:end -->
    """
    lines = [f"**memguard: {note.outcome}** for revision `{revision}`. {note.reason}", note.markdown]
    body = "\n\n".join(line.strip() for line in lines if line).replace("<!--", "&lt;!--")
    return f"{START}\n{body}\n{END}"


def card_with_verdict(card: str, section: str, metadata: Mapping[str, str]) -> str:
    """A model card with the section and metadata put in, in place of older ones; doing it twice changes nothing.

    Args:
        card: the text of README.md; empty for none.
        section: as `verdict_section` gives it.
        metadata: what stands under `memguard:` in the head of the card.

    Raises:
        RegistryError: the head of the card is not plain metadata, or one of the markers stands alone.
    """
    from huggingface_hub import ModelCard

    if (card.count(START), card.count(END)) not in ((0, 0), (1, 1)) or card.find(END) < card.find(START):
        raise RegistryError("the model card must hold both markers of memguard once, or neither. Remove them.")
    try:
        parsed = ModelCard(card or "---\n{}\n---\n")
    except Exception as error:
        raise RegistryError(f"the metadata at the head of the model card cannot be read ({type(error).__name__}).") from None
    newline = "\r\n" if "\r\n" in card else "\n"
    parsed.data[METADATA] = dict(metadata)
    parsed.text = _with_section(parsed.text, section.replace("\n", newline), newline)
    return str(parsed)


def _with_section(text: str, section: str, newline: str) -> str:
    if START in text:
        before, _, rest = text.partition(START)
        return before + section + rest.partition(END)[2]
    return text.rstrip() + newline * 2 + section + newline
