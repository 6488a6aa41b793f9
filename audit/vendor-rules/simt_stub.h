// The kernels use no SIMT.
#pragma once
