"""`make bench-engines`: real engines, alone and behind two proxies, asked by a load generator that is not ours.

```
__main__   the order of things ─► targets     starts engines and proxies
             │                    environment installs guidellm, once
             │                    guidellm    one run of the tool; its report, read
             │                    legs        first tokens one at a time, beside the two legs sent by hand
             └► figures (pure) ─► report      tables, plots, docs/decisions/real-engines.md
loads: what is asked
```
"""
