"""Does another tree of dsx produce the same bits? What one tree produces, and a comparison of two.

`record.py` trains ten presets and further combinations of methods in one process and over gloo, a
DeepSpeed ZeRO-2 engine and a Megatron TP2 model, most of them also stopped midway and resumed by
new processes, and writes hashes of weights and outer state and the deterministic fields of all
records to a JSON file. It uses dsx's public API and a model of its own, so the same script runs on
an older and on a newer tree: PYTHONPATH says on which.

    PYTHONPATH=OLD_TREE python tests/identity/record.py --out old.json
    PYTHONPATH=. python tests/identity/record.py --out new.json
    python tests/identity/compare.py old.json new.json

Imports between these files are relative: the script loads them apart from the `tests` of the tree
that it examines. Both files must come from one machine, one torch and one number of threads (the
scripts set it to one): elsewhere a matrix product may round otherwise.
"""
