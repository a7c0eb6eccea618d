#!/usr/bin/env python3
"""Texts that docs/learned.md learns from, out of Debian packages: learned_texts.py DIRECTORY

Fetches anarchism, debian-handbook, jargon-text and r-cran-janeaustenr with `apt-get download`, unpacks them below DIRECTORY without
installing anything, and writes emma.txt, northanger.txt, persuasion.txt, faq.txt, handbook.txt and jargon.txt there.
"""
import glob
import gzip
import html
import os
import re
import struct
import subprocess
import sys
import zlib

PACKAGES = ["anarchism", "debian-handbook", "jargon-text", "r-cran-janeaustenr"]
NOVELS = {"emma": b"Hartfield", "northanger": b"Tilney", "persuasion": b"Kellynch"}  # a word of each alone
MOST = 900_000  # characters


def text_of_page(page):
    page = re.sub(r"(?s)<(script|style|head).*?</\1>", "", page)
    page = re.sub(r"</(p|h\d|li|div|tr|dt|dd|blockquote)>|<br ?/?>", "\n", page)
    page = html.unescape(re.sub(r"<[^>]+>", "", page)).replace("\xa0", " ")
    page = re.sub(r" *\n *", "\n", re.sub(r"[ \t]+", " ", page))
    return re.sub(r"\n\s*\n+", "\n\n", page).strip()


def text_of_pages(pattern):
    pages = []
    for path in sorted(glob.glob(pattern)):
        with open(path, errors="ignore") as file:
            pages.append(text_of_page(file.read()))
    return "\n\n".join(pages)


def objects_of_rdb(data):
    """What a lazy-load database of R holds: zlib streams, each behind its length."""
    at = data.find(b"\x78")
    while at >= 0:
        stream = zlib.decompressobj()
        try:
            yield stream.decompress(data[at:])
            at = data.find(b"\x78", len(data) - len(stream.unused_data))
        except zlib.error:
            at = data.find(b"\x78", at + 1)


def strings_of(serialised):
    """Character strings of a serialised R vector: type 9 and a length before each."""
    lines, at = [], 0
    while (found := re.compile(rb"\x00.\x00\x09(....)", re.S).search(serialised, at)) is not None:
        (length,) = struct.unpack(">i", found.group(1))
        if not 0 <= length <= 500:
            at = found.start() + 1
            continue
        at = found.end() + length
        lines.append(serialised[found.end() : at].decode("utf-8", "ignore"))
    return re.sub(r"\n\n+", "\n\n", "\n".join(lines))


def main(directory):
    os.makedirs(directory, exist_ok=True)
    subprocess.run(["apt-get", "download", *PACKAGES], cwd=directory, check=True)
    for package in PACKAGES:
        (archive,) = glob.glob(f"{directory}/{package}_*.deb")
        subprocess.run(["dpkg-deb", "-x", archive, f"{directory}/unpacked"], check=True)
    share = f"{directory}/unpacked/usr/share/doc"
    texts = {
        "faq": text_of_pages(f"{share}/anarchism/html/sec[A-D]*.html"),
        "handbook": text_of_pages(f"{share}/debian-handbook/html/en-US/*.html"),
    }
    with gzip.open(f"{share}/jargon-text/jargon.txt.gz", "rt", errors="ignore") as file:
        texts["jargon"] = file.read()
    with open(f"{directory}/unpacked/usr/lib/R/site-library/janeaustenr/data/Rdata.rdb", "rb") as file:
        novels = [n for n in objects_of_rdb(file.read()) if len(n) > 100_000]
    for name, word in NOVELS.items():
        (novel,) = [n for n in novels if word in n]
        texts[name] = strings_of(novel)
    for name, text in texts.items():
        with open(f"{directory}/{name}.txt", "w") as file:
            file.write(text[:MOST])


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
