"""The kinds of layers that caches of transformers have, and what each keeps of a sequence.

`registry.kind_of` looks at a layer and says which `LayerKind` it is. Models whose attention kvdb does not answer are stored and
handed back through them: `engine_adapter.transformers.own`.
"""
