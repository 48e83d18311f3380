// random_values.hpp: seeded inputs and the measures that declared bounds speak of.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "reference/format.hpp"

namespace lowlat::testing {

class Random {
 public:
  explicit Random(std::uint32_t seed) : engine_(seed) {}

  double normal() { return normal_(engine_); }
  // first .. last, both included.
  std::int64_t integer(std::int64_t first, std::int64_t last) {
    return first +
           static_cast<std::int64_t>(engine_() % static_cast<std::uint64_t>(last - first + 1));
  }
  std::vector<float> f32(std::size_t n, double scale = 1.0) {
    std::vector<float> values(n);
    for (float& v : values) v = static_cast<float>(scale * normal());
    return values;
  }
  std::vector<std::uint16_t> bf16(std::size_t n, double scale = 1.0) {
    std::vector<std::uint16_t> codes(n);
    for (std::uint16_t& code : codes) code = reference::to_bf16(scale * normal());
    return codes;
  }
  // Stored key-value rows: e4m3 codes that are numbers, scales near 1, bf16.
  std::vector<std::uint8_t> kv_rows(std::size_t n) {
    std::vector<std::uint8_t> bytes(n * 584);
    for (std::size_t i = 0; i < n; ++i) {
      std::uint8_t* row = &bytes[i * 584];
      for (int d = 0; d < 448; ++d) row[d] = reference::to_e4m3(100.0 * normal());
      for (int d = 0; d < 64; ++d) {
        const std::uint16_t code = reference::to_bf16(normal());
        row[448 + 2 * d] = static_cast<std::uint8_t>(code & 255u);
        row[449 + 2 * d] = static_cast<std::uint8_t>(code >> 8);
      }
      for (int group = 0; group < 7; ++group) {
        row[576 + group] = static_cast<std::uint8_t>(integer(118, 121));
      }
    }
    return bytes;
  }
  // Stored index rows: any codes, scales near 1.
  std::vector<std::uint8_t> index_rows(std::size_t n) {
    std::vector<std::uint8_t> bytes(n * 68);
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      bytes[i] = static_cast<std::uint8_t>(i % 68 < 64 ? integer(0, 255) : integer(124, 127));
    }
    return bytes;
  }
  // V4's: e4m3 codes that are numbers, a positive fp32 scale near 2^-8.
  std::vector<std::uint8_t> index_fp8_rows(std::size_t n) {
    std::vector<std::uint8_t> bytes(n * 132);
    for (std::size_t i = 0; i < n; ++i) {
      std::uint8_t* row = &bytes[i * 132];
      for (int d = 0; d < 128; ++d) row[d] = reference::to_e4m3(150.0 * normal());
      const auto scale = std::bit_cast<std::uint32_t>(
          static_cast<float>(std::ldexp(1.0 + std::abs(normal()), -8)));
      for (int b = 0; b < 4; ++b) row[128 + b] = static_cast<std::uint8_t>(scale >> 8 * b);
    }
    return bytes;
  }
  // e4m3 codes that are numbers.
  std::vector<std::uint8_t> e4m3(std::size_t n, double scale) {
    std::vector<std::uint8_t> codes(n);
    for (std::uint8_t& code : codes) code = reference::to_e4m3(scale * normal());
    return codes;
  }

 private:
  std::mt19937 engine_;
  std::normal_distribution<double> normal_;
};

inline std::vector<double> values_of(const std::vector<std::uint16_t>& codes) {
  std::vector<double> values;
  for (const std::uint16_t code : codes) values.push_back(reference::from_bf16(code));
  return values;
}
inline std::vector<double> values_of(const std::vector<float>& v) { return {v.begin(), v.end()}; }

// ||a - b|| / ||b||
inline double rel_l2(const std::vector<double>& a, const std::vector<double>& b) {
  double diff = 0.0, norm = 0.0;
  for (std::size_t i = 0; i < b.size(); ++i) {
    diff += (a.at(i) - b[i]) * (a.at(i) - b[i]);
    norm += b[i] * b[i];
  }
  return norm > 0.0 ? std::sqrt(diff / norm) : std::sqrt(diff);
}

}  // namespace lowlat::testing
