import subprocess
import sys

from twinpool.block_hash import chain_hashes, chain_root


def test_golden_vector():
    root = chain_root("rev", "", "")
    assert root.hex() == "bbf94a9ba2fdd5aebd7a3db47145162e"
    hashes = chain_hashes(root, [1, 2, 3, 4, 5, 6, 7, 8, 9], 4)
    assert [block.hex() for block in hashes] == ["5afc0958b8f5221e8ecc62fd3d17f0a5", "4d54d26d7809c184f8a4bfd25cf76c74"]


def test_only_full_blocks_and_chain_continues():
    root = chain_root("rev", "", "")
    tokens = list(range(100, 117))
    whole = chain_hashes(root, tokens, 4)
    assert len(whole) == 4
    assert chain_hashes(root, tokens[:3], 4) == []
    assert chain_hashes(whole[1], tokens[8:], 4) == whole[2:]


def test_everything_that_changes_kv_changes_the_hash():
    base = chain_hashes(chain_root("rev", "", ""), [1, 2, 3, 4], 4)
    roots = [
        chain_root("rev2", "", ""),
        chain_root("rev", "a", ""),
        chain_root("rev", "", "a"),
        chain_root("re", "v", ""),
    ]
    others = [chain_hashes(root, [1, 2, 3, 4], 4) for root in roots]
    assert len({base[0], *(other[0] for other in others)}) == 5
    assert chain_hashes(base[0], [1, 2, 3, 4], 4) != base


def test_stable_across_processes():
    code = (
        "from twinpool.block_hash import *; print(chain_hashes(chain_root('rev', '', 's'), [1, 2, 3, 4], 4)[0].hex())"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == chain_hashes(chain_root("rev", "", "s"), [1, 2, 3, 4], 4)[0].hex()
