// The vendor's kernel_operator.h without its operator library (adv_api), which needs generated
// headers and which the kernels do not use.
#pragma once
#include "basic_api/kernel_basic_intf.h"
#include "global_scalars.h"
