// Random tensor lists for property tests: small and awkward shapes, all dtypes, random cuts.
#pragma once

#include <random>
#include <set>
#include <string>
#include <vector>

#include "deltasync/layout.hpp"

namespace deltasync::testing_support {

class RandomSpecs {
 public:
  explicit RandomSpecs(std::uint64_t seed) : random_(seed) {}

  std::uint64_t below(std::uint64_t n) { return std::uniform_int_distribution<std::uint64_t>(0, n - 1)(random_); }

  std::vector<TensorSpec> list(std::size_t tensors_max) {
    std::vector<TensorSpec> specs(below(tensors_max + 1));
    for (std::size_t i = 0; i < specs.size(); ++i) specs[i] = one("t" + std::to_string(i));
    return specs;
  }

  TensorSpec one(std::string name) {
    TensorSpec s;
    s.name = std::move(name);
    s.dtype = static_cast<Dtype>(1 + below(20));
    const auto ndim = below(4);
    for (std::uint64_t d = 0; d < ndim; ++d) s.shape.push_back(dim(d + 1 == ndim));
    const auto packed = dtype_packed(s.dtype);
    if (packed != 1 && s.shape.empty()) s.shape.push_back(1);
    if (packed != 1) s.shape.back() *= packed;
    std::uint64_t rows = 1;
    for (std::uint64_t d = 0; d + 1 < ndim; ++d) rows *= s.shape[d];
    const std::uint64_t cols = s.shape.empty() ? 1 : s.shape.back() / packed;
    if (rows != 0 && cols != 0) {
      s.row_cuts = cuts(rows);
      s.col_cuts = cuts(cols);
    }
    return s;
  }

 private:
  std::uint64_t dim(bool last) {
    switch (below(8)) {
      case 0: return below(2);
      case 1: return 1 + below(8);
      case 2: return last ? 65'530 + below(12) : 1 + below(20);
      case 3: return last ? 131'000 + below(200) : 1 + below(3);
      case 4: return last ? 1 + below(300'000) : 1 + below(3);
      default: return 1 + below(last ? 3000 : 60);
    }
  }
  std::vector<std::uint64_t> cuts(std::uint64_t length) {
    std::set<std::uint64_t> at;
    if (length > 1 && below(2) == 0) {
      const auto n = below(6);
      for (std::uint64_t i = 0; i < n; ++i) at.insert(1 + below(length - 1));
    }
    return {at.begin(), at.end()};
  }

  std::mt19937_64 random_;
};

}  // namespace deltasync::testing_support
