// Unscaling gradients, and what GradScaler makes of those that are not finite.
#include "kernel.h"

using namespace emulator;

ACLNN(aclnnForeachNonFiniteCheckAndUnscale, (Updates grads, Out found_inf, In inverse_scale),
      at::_amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inverse_scale))

// The last two are the first two again, as torch_npu calls it.
ACLNN(aclnnAmpUpdateScale,
      (Out scale, Out growth_tracker, In found_inf, double growth, double backoff, int64_t interval, Out, Out),
      at::_amp_update_scale_(scale, growth_tracker, found_inf, growth, backoff, interval))
