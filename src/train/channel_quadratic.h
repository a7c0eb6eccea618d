// What dropping channels of old keys costs, to second order and without training: LeanK's mask linearised where some
// channels are dropped already.
//
// With delta = 1 for channels dropped in addition, and z and e of grad/channel_gram.h, outputs move by about
// -sum_c delta_c z_tc, and the loss of a KV head in its layer is
//   sum_t |e_t - sum_c delta_c z_tc|^2 = base - 2 linear . delta + delta^T H delta.
// Terms between heads are left out. The approximation holds near the mask that it was taken at, so it is taken anew
// after every few channels.
#pragma once

#include <cstdint>
#include <vector>

namespace longkv {

// Of one KV head.
struct ChannelQuadratic {
  std::vector<double> h;       // [dim_k][dim_k]
  std::vector<double> linear;  // [dim_k]
  double base = 0;
};

// Adds `weight` times what a head's gram [dim_k + 1][dim_k + 1] of channel_grams() says.
void add_channel_gram(const double* gram, double weight, ChannelQuadratic& to);

// Drops `n` channels of those that `kept` marks, always the one that raises the loss least, unmarks them and appends
// them to `order`. Returns the loss reached.
double eliminate_channels(const ChannelQuadratic& q, int64_t n, std::vector<bool>& kept, std::vector<int>& order);

}  // namespace longkv
