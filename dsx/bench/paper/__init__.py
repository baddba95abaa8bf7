"""`dsx bench paper NAME`: a paper's table again, at this machine's scale, ours beside published.

Imports the other measurements of bench, and the rooms below. A table is a declaration in the file
of its paper, which imports no torch, so names are listed and completed at once. To add one:

1. In `dsx/bench/paper/<paper>.py` add a `Table` to `TABLES`: its name, where it stands, a `Row` per
   label (the paper's), `Column`s for the figures that are shown, and `Claim`s: the paper's order of
   labels by one figure. A row's `published` has what the paper prints, by column.
2. Say how it is measured (measure.py): `Loss`, training as `dsx bench convergence` does, with seeds
   and a full and a short `Study`; `Simulation`, a function from row, seed and `short` to figures;
   `Lines`, real processes on throttled lines, as `dsx bench e2e` does.
3. `minutes` are those of two cores with nothing else to do, full and short: they are told before a
   measurement starts. Full under 30, short under 5.
4. A page docs/results/papers/<paper>.md tells what was found, with the command and the date.

The verdict is computed from the samples (verdict.py) and never written down beside a table.
"""
