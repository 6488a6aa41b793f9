// What the vendor's checks ask of the model of a core: its mask registers and mask mode.
#pragma once

inline uint64_t ModelFactoryGetMaskHigh() { return cce::core().mask_high; }
inline uint64_t ModelFactoryGetMaskLow() { return cce::core().mask_low; }
inline int ModelFactoryGetMaskMode() { return cce::core().counter_mode ? 1 : 0; }
