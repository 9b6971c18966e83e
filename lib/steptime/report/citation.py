"""How to cite the study and the papers that it re-measures, from CITATION.cff."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steptime.core.errors import InputError
from steptime.core.files import read_yaml


@dataclass(frozen=True)
class Cited:
    """One work. `text`: for a list of references; `bibtex`: the same as an entry."""

    text: str
    bibtex: str
    link: str


@dataclass(frozen=True)
class Citation:
    """The study itself, and the works that it builds on."""

    message: str
    own: Cited
    references: tuple[Cited, ...]


def read(path: Path) -> Citation:
    """The citation in a CITATION.cff file (https://citation-file-format.github.io). Raises InputError naming a missing
    key."""
    content = read_yaml(path)
    try:
        references = tuple(_cited(item) for item in content.get("references", []))
        return Citation(content["message"], _cited(content), references)
    except KeyError as error:
        raise InputError(f"{path}: {error.args[0]}: is missing; add it") from None


def _cited(item: dict[str, Any]) -> Cited:
    authors = item["authors"]
    people = [_name(author) for author in authors]
    year = str(item["year"]) if "year" in item else ""
    link = item.get("url") or (f"https://doi.org/{item['doi']}" if "doi" in item else "")
    version = f"version {item['version']}" if "version" in item else ""
    text = ". ".join(filter(None, [", ".join(people), item["title"], year or version, link]))
    fields = {
        "author": " and ".join("{" + _name(author) + "}" if "name" in author else _name(author) for author in authors),
        "title": "{" + item["title"] + "}",
        "year": year,
        "doi": item.get("doi", ""),
        "url": link,
        "note": version,
    }
    kind = "article" if item.get("type") == "article" else "misc"
    word = "".join(letter for letter in people[0].split()[-1].lower() if letter.isalnum())
    lines = [f"  {name} = {{{value}}}" for name, value in fields.items() if value]
    return Cited(text, f"@{kind}{{{word}{year},\n" + ",\n".join(lines) + "\n}", link)


def _name(author: dict[str, str]) -> str:
    """ "Given Family", or the name of a group."""
    return author["name"] if "name" in author else f"{author['given-names']} {author['family-names']}"
