// Ascend C on the host: the subset of the kernel API that a vector kernel, or one with
// a cube core, uses, with checks.
//
// Written from the public documentation of the API. A kernel source that includes this file in
// place of the toolkit's compiles with any C++17 compiler and runs inside the simulator.
// docs/dev/simulator.md lists what is modelled and what is not.
#pragma once

#include "ascend_sim/keywords.h"
#include "ascend_sim/numeric.h"
#include "ascend_sim/block.h"
#include "ascend_sim/sync.h"
#include "ascend_sim/tensors.h"
#include "ascend_sim/queues.h"
#include "ascend_sim/params.h"
#include "ascend_sim/dma.h"
#include "ascend_sim/vector_engine.h"
#include "ascend_sim/vector.h"
#include "ascend_sim/cast.h"
#include "ascend_sim/rearrange.h"
#include "ascend_sim/group.h"
#include "ascend_sim/cube.h"
