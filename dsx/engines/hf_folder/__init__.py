"""The averaged model as a folder that `AutoModelForCausalLM.from_pretrained` loads.

`folder` puts it together; `names` says whether the run's tensors are those of the model that a
config.json describes, asked of transformers where it is installed (`architecture`); `card` tells
what the run's records say of it. Nothing here but `architecture` imports transformers.
"""
