// Eigenvalues and vectors of small symmetric matrices.
#pragma once

#include <cstdint>
#include <vector>

namespace longkv {

struct Eigen {
  std::vector<double> values;   // [n], falling
  std::vector<double> vectors;  // [n][n], one per row, of length 1
};

// By Jacobi's rotations. matrix: [n][n]; what lies below the diagonal is taken to equal what lies above.
Eigen eigen_symmetric(std::vector<double> matrix, int64_t n);

}  // namespace longkv
