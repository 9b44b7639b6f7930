"""The operators that are left to torch_npu's own kernels, because libopapi serves what those call.

An operator that is not named here goes to the CPU fallback. Give a new kernel's operators a line here and a
case in emulator/tests/test_gradients.py or test_kernels.py.
"""


def native_operators() -> frozenset[str]:
    """Qualified names with overloads, such as "aten::add.Tensor"."""
    return frozenset(
        f"{namespace}::{name}"
        for namespace, groups in (("aten", _ATEN), ("npu", _NPU))
        for names in groups.values()
        for name in names.split()
    )


_ATEN = {
    "memory and metadata: nothing is computed": """
        _lazy_clone _pin_memory _reshape_alias as_strided as_strided_ contiguous empty.memory_format
        empty_like empty_strided empty_with_format empty_with_swapped_memory is_pinned is_set_to
        new_empty_strided record_stream resize_ resize_as_ set_ set_.source_Storage
        set_.source_Storage_storage_offset set_.source_Tensor squeeze squeeze.dim unfold
        unsafe_empty_with_format unsqueeze view view_as_complex view_as_real
    """,
    "copies and casts": """
        _copy_from_and_resize _foreach_copy_ _local_scalar_dense _to_copy clone copy_
    """,
    "filling and building": """
        arange arange.out arange.start arange.start_out arange.start_step cat cat.out constant_pad_nd
        eye eye.m eye.m_out eye.out fill_.Scalar fill_.Tensor flip full full.out ones ones.out ones_like
        repeat roll stack stack.out tril tril.out tril_ triu triu.out triu_ zero_ zeros zeros.out
    """,
    "elementwise": """
        abs abs.out abs_ add.Scalar add.Tensor add.out add_.Scalar add_.Tensor addcdiv addcdiv.out
        addcdiv_ addcmul addcmul.out addcmul_ bitwise_and.Scalar bitwise_and.Scalar_out
        bitwise_and.Tensor bitwise_and.Tensor_out bitwise_and_.Scalar bitwise_and_.Tensor bitwise_not
        bitwise_not.out bitwise_not_ bitwise_or.Scalar bitwise_or.Scalar_out bitwise_or.Tensor
        bitwise_or.Tensor_out ceil ceil.out ceil_ clamp clamp.Tensor clamp.Tensor_out clamp.out clamp_
        clamp_.Tensor clamp_max clamp_max.Tensor clamp_max.Tensor_out clamp_max.out clamp_max_
        clamp_max_.Tensor clamp_min clamp_min.Tensor clamp_min.Tensor_out clamp_min.out clamp_min_
        clamp_min_.Tensor cos cos.out cos_ cosh cosh.out cosh_ div.Scalar div.Scalar_mode div.Tensor
        div.Tensor_mode div.out div.out_mode div_.Scalar div_.Scalar_mode div_.Tensor div_.Tensor_mode
        erf erf.out erf_ exp exp.out exp2 exp2.out exp2_ exp_ expm1 expm1.out expm1_ floor floor.out
        floor_ floor_divide floor_divide.Scalar floor_divide.out floor_divide_.Scalar
        floor_divide_.Tensor isfinite isneginf.out lerp.Scalar lerp.Scalar_out lerp.Tensor lerp.Tensor_out
        lerp_.Scalar lerp_.Tensor log log.out log10 log10.out log10_ log1p log1p.out log1p_ log2
        log2.out log2_ log_ logical_and logical_and.out logical_and_ logical_not logical_not.out
        logical_not_ logical_or logical_or.out logical_or_ logical_xor logical_xor.out
        masked_fill_.Scalar masked_fill_.Tensor maximum maximum.out minimum minimum.out mul.Scalar
        mul.Tensor mul.out mul_.Scalar mul_.Tensor neg neg.out neg_ polar polar.out pow.Scalar
        pow.Scalar_out pow.Tensor_Scalar pow.Tensor_Scalar_out pow.Tensor_Tensor pow.Tensor_Tensor_out
        pow_.Scalar pow_.Tensor reciprocal reciprocal.out reciprocal_ round round.out round_ rsqrt
        rsqrt.out rsqrt_ rsub.Scalar rsub.Tensor sgn sgn.out sigmoid sigmoid.out sigmoid_ sign sign.out
        sign_ sin sin.out sin_ sinh sinh.out sinh_ sqrt sqrt.out sqrt_ sub.Scalar sub.Tensor sub.out
        sub_.Scalar sub_.Tensor tan tan.out tan_ tanh tanh.out tanh_ trunc trunc.out trunc_ where
        where.self where.self_out
    """,
    "comparisons": """
        eq.Scalar eq.Scalar_out eq.Tensor eq.Tensor_out eq_.Scalar eq_.Tensor ge.Scalar ge.Scalar_out
        ge.Tensor ge.Tensor_out ge_.Scalar ge_.Tensor gt.Scalar gt.Scalar_out gt.Tensor gt.Tensor_out
        gt_.Scalar gt_.Tensor le.Scalar le.Scalar_out le.Tensor le.Tensor_out le_.Scalar le_.Tensor
        lt.Scalar lt.Scalar_out lt.Tensor lt.Tensor_out lt_.Scalar lt_.Tensor ne.Scalar ne.Scalar_out
        ne.Tensor ne.Tensor_out ne_.Scalar ne_.Tensor
    """,
    "activations": """
        elu elu.out elu_ elu_backward elu_backward.grad_input glu glu.out glu_backward
        glu_backward.grad_input hardsigmoid hardsigmoid.out hardsigmoid_ hardsigmoid_backward hardswish
        hardswish.out hardswish_ hardswish_backward hardtanh hardtanh.out hardtanh_ hardtanh_backward
        hardtanh_backward.grad_input leaky_relu leaky_relu.out leaky_relu_ leaky_relu_backward
        leaky_relu_backward.grad_input log_sigmoid log_sigmoid.out log_sigmoid_backward
        log_sigmoid_backward.grad_input log_sigmoid_forward log_sigmoid_forward.output mish mish.out mish_
        mish_backward relu relu_ sigmoid_backward sigmoid_backward.grad_input silu silu.out silu_
        silu_backward silu_backward.grad_input softplus softplus.out
        softplus_backward.grad_input tanh_backward tanh_backward.grad_input threshold threshold.out
        threshold_ threshold_backward
    """,
    "matrix products": """
        addmm addmm.dtype addmm.dtype_out addmm.out addmm_ baddbmm baddbmm.dtype baddbmm.dtype_out
        baddbmm.out baddbmm_ bmm bmm.dtype bmm.dtype_out bmm.out dot dot.out matmul matmul.out
        matmul_backward mm mm.dtype mm.dtype_out mm.out mv mv.out
    """,
    "convolutions, pooling and images": """
        _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _convolution avg_pool2d avg_pool2d_backward
        convolution convolution_backward max_pool2d_with_indices max_pool2d_with_indices_backward
        upsample_bilinear2d upsample_bilinear2d.out upsample_bilinear2d_backward
        upsample_bilinear2d_backward.grad_input upsample_nearest1d upsample_nearest1d.out
        upsample_nearest1d_backward upsample_nearest1d_backward.grad_input upsample_nearest2d
        upsample_nearest2d.out upsample_nearest2d_backward upsample_nearest2d_backward.grad_input
    """,
    "reductions": """
        all all.all_out all.dim all.out amax amax.out amin amin.out any any.all_out any.dim any.out
        argmax.out argmin argmin.out histc histc.out linalg_vector_norm linalg_vector_norm.out
        logsumexp logsumexp.out max max.dim max.dim_max max.out mean mean.dim mean.out min min.dim
        min.dim_min min.out std.correction std.correction_out sum sum.IntList_out sum.dim_IntList
        var.correction var.correction_out var_mean.correction
    """,
    "softmax, norms, losses, attention": """
        _fused_sdp_choice _log_softmax _log_softmax.out _log_softmax_backward_data
        _log_softmax_backward_data.out _native_batch_norm_legit _softmax _softmax.out
        _softmax_backward_data _softmax_backward_data.out binary_cross_entropy_with_logits mse_loss
        mse_loss.out mse_loss_backward mse_loss_backward.grad_input native_batch_norm
        native_batch_norm_backward native_group_norm native_group_norm_backward native_layer_norm
        native_layer_norm_backward nll_loss_backward nll_loss_backward.grad_input nll_loss_forward
        nll_loss_forward.output scaled_dot_product_attention smooth_l1_loss smooth_l1_loss.out
        smooth_l1_loss_backward smooth_l1_loss_backward.grad_input softmax.int
    """,
    "indexing and order": """
        _index_put_impl_ cumsum cumsum.out embedding embedding_dense_backward gather gather.out
        index.Tensor index_add index_add.out index_put index_put_ index_select index_select.out
        scatter.src_out scatter_.src scatter_add scatter_add_ sort sort.stable sort.values
        sort.values_stable topk topk.values
    """,
    "random": """
        bernoulli bernoulli.out bernoulli.p bernoulli_.Tensor bernoulli_.float native_dropout
        native_dropout_backward normal_ random_ random_.from random_.to uniform_
    """,
    "optimizers": """
        _amp_foreach_non_finite_check_and_unscale_ _amp_update_scale_
        _foreach_abs _foreach_abs_ _foreach_add.List _foreach_add.Scalar _foreach_add.ScalarList
        _foreach_add_.List _foreach_add_.Scalar _foreach_add_.ScalarList _foreach_addcdiv.Scalar
        _foreach_addcdiv.ScalarList _foreach_addcdiv.Tensor _foreach_addcdiv_.Scalar
        _foreach_addcdiv_.ScalarList _foreach_addcdiv_.Tensor _foreach_addcmul.Scalar
        _foreach_addcmul.ScalarList _foreach_addcmul.Tensor _foreach_addcmul_.Scalar
        _foreach_addcmul_.ScalarList _foreach_addcmul_.Tensor _foreach_clamp_max.List
        _foreach_clamp_max.Scalar _foreach_clamp_max.ScalarList _foreach_clamp_max_.List
        _foreach_clamp_max_.Scalar _foreach_clamp_max_.ScalarList _foreach_clamp_min.List
        _foreach_clamp_min.Scalar _foreach_clamp_min.ScalarList _foreach_clamp_min_.List
        _foreach_clamp_min_.Scalar _foreach_clamp_min_.ScalarList _foreach_div.List _foreach_div.Scalar
        _foreach_div.ScalarList _foreach_div_.List _foreach_div_.Scalar _foreach_div_.ScalarList
        _foreach_exp _foreach_exp_ _foreach_lerp.List _foreach_lerp.Scalar _foreach_lerp_.List
        _foreach_lerp_.Scalar _foreach_log _foreach_log_ _foreach_maximum.List _foreach_maximum.Scalar
        _foreach_maximum.ScalarList _foreach_maximum_.List _foreach_maximum_.Scalar
        _foreach_maximum_.ScalarList _foreach_minimum.List _foreach_minimum.Scalar
        _foreach_minimum.ScalarList _foreach_minimum_.List _foreach_minimum_.Scalar
        _foreach_minimum_.ScalarList _foreach_mul.List _foreach_mul.Scalar _foreach_mul.ScalarList
        _foreach_mul_.List _foreach_mul_.Scalar _foreach_mul_.ScalarList _foreach_neg _foreach_neg_
        _foreach_norm.Scalar _foreach_pow.List _foreach_pow.Scalar _foreach_pow.ScalarAndTensor
        _foreach_pow.ScalarList _foreach_pow_.List _foreach_pow_.Scalar _foreach_pow_.ScalarList
        _foreach_reciprocal _foreach_reciprocal_ _foreach_sigmoid _foreach_sigmoid_ _foreach_sign
        _foreach_sign_ _foreach_sqrt _foreach_sqrt_ _foreach_sub.List _foreach_sub.Scalar
        _foreach_sub.ScalarList _foreach_sub_.List _foreach_sub_.Scalar _foreach_sub_.ScalarList
        _foreach_tanh _foreach_tanh_ _foreach_zero_ _fused_adamw_ _fused_sgd_ _fused_sgd_.tensor_lr
    """,
}

_NPU = {
    "copies and casts": """
        _npu_dtype_cast _npu_dtype_cast_backward npu_dtype_cast npu_dtype_cast_ npu_dtype_cast_backward
        one_ copy_memory_ npu_change_data_ptr get_npu_format get_storage_size npu_format_cast
        npu_format_cast.Tensor npu_format_cast_.acl_format _npu_format_cast
    """,
    "what a graph shows of a tensor: a host function gets it": """
        print_npugraph_tensor save_npugraph_tensor save_npugraph_tensor.tensor_list
    """,
    "activations, norms, attention, losses": """
        fast_gelu npu_fast_gelu npu_fast_gelu_backward npu_geglu npu_geglu_grad npu_cross_entropy_loss
        npu_cross_entropy_loss_backward npu_rotary_mul npu_rotary_mul_backward
        npu_gelu npu_gelu_backward npu_swiglu npu_swiglu_backward npu_rms_norm npu_rms_norm_backward
        npu_fusion_attention npu_fusion_attention_grad npu_fusion_attention_v3
        npu_fusion_attention_grad_v3 npu_binary_cross_entropy_with_logits_backward
    """,
    "matrix products": """
        matmul_double_backward npu_grouped_matmul npu_grouped_matmul.List
    """,
    "mixtures of experts": """
        _npu_moe_token_unpermute npu_moe_token_permute npu_moe_token_permute_grad
        npu_moe_token_permute_grad_v2 npu_moe_token_unpermute npu_moe_token_unpermute_grad
        npu_moe_token_unpermute_grad_v2
    """,
    "indexing and random": """
        npu_gather_backward _npu_dropout npu_dropout_backward
    """,
}
