// The type is in audit/vendor-headers/prelude.h.
#pragma once
