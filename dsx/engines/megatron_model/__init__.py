"""A Megatron run's model as one, put together from the files of its ranks; needs no megatron.

`notes` is what a run has saved of its model beside the outer state, `joined` puts the slices of
tensor parallelism together, `family` says which architecture of Hugging Face the model is, and
`gpt2` and `llama` give its weights the names and the form that they have there.
"""
