"""The decoder of all families and its parts: attention, feed-forward, their parameters and the fused path.

family_config.py   FamilyConfig: every layer as a LayerSpec (mixer and feed-forward), grouped into blocks for the scan
decoder.py         FamilyDecoder, which runs a FamilyConfig
grouped_attention.py, latent_attention.py, delta_attention.py, short_convolution.py   the mixers
feed_forward.py    Dense and Sparse; dense_beside_sparse.py: both in one layer
sparse_block.py    route, record, run experts; expert_names.py: their tensors' names
step_record.py     the blocks that a step's rows are written to
layer_parts.py     what these parts are called with; layer_params.py: their parameters inside a scan
fused_path.py      a block of layers in one kernel or in few, where kernels have the features that the layers need
fused_layers.py    MoE layers in few kernels; layer_counts.py: the numbers of layers in the cache and in the record
code_selection.py  which matrices stay codes in memory; coded_arrays.py: their arrays; layer_regrouping.py: other blocks
replica_maps.py    experts placed on devices"""
