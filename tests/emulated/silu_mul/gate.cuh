// In place of an activation whose bits other tests hold.
#pragma once
#include <cmath>

namespace vx {

struct DeviceGate {
  float s;
};
template <bool>
DeviceGate gate_of(float x) {
  return {1 / (1 + expf(-x))};
}
inline float exp_of_negative(float x) { return expf(x); }
inline float exp_of_positive(float x) { return expf(x); }
inline float exp_term(float x) { return expf(x); }

}  // namespace vx
