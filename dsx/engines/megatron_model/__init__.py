"""A Megatron run's model as one, put together from the files of its ranks; needs no megatron.

`notes` is what a run has saved of its model beside the outer state, `joined` puts the slices of
tensor and expert parallelism together, `family` says which architecture of Hugging Face the model
is, and `gpt2`, `llama` and `mixture` are the table of its weights, there and here. Read backwards
it makes a model of Megatron's of a Hugging Face folder (`from_config`, `from_huggingface`). Either
becomes a checkpoint of Megatron's own (`dist_keys`, `dist_checkpoint`).
"""
