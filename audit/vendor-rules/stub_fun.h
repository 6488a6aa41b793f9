// The intrinsics are in audit/vendor-headers.
#pragma once
