// matrix_ops.cpp: products of small matrices, which a wave's lanes hold together.
//
// Lane l holds row (of A) or column (of B) l % M, and of the K elements a run that l / M numbers.
// Results: lane l has column l % N; its registers go down the rows, four at a time and lane group
// after lane group. Products are exact; their sum with C is made in double precision and rounded
// once, to the nearest or, with an approximation's seed, up or down: hardware's own order is not
// published, and gfx942 is seen to round sums downwards (arXiv 2511.10909). So results are compared
// within bounds that hold for either.
#include <vector>

#include "machine.hpp"
#include "operands.hpp"

namespace amd {
namespace {

enum class Element : u8 { f32, f16, bf16, i8, fp8, bf8, fp6, bf6, fp4 };

struct Shape {
  int rows, depth;  // rows == columns
};

double element(const Wave& w, Element type, u32 bits) {
  const bool open = w.group->launch->machine->is_gfx950;
  switch (type) {
    case Element::f32: return bits_float(bits);
    case Element::f16: return half_float(bits);
    case Element::bf16: return bfloat_float(bits & 0xffff);
    case Element::i8: return static_cast<i8>(bits);
    case Element::fp8: return decode(open ? kE4m3Fn : kE4m3Fnuz, bits);
    case Element::bf8: return decode(open ? kE5m2 : kE5m2Fnuz, bits);
    case Element::fp6: return decode(kE2m3, bits);
    case Element::bf6: return decode(kE3m2, bits);
    case Element::fp4: return decode(kE2m1, bits);
  }
  return 0;
}
int bits_of(Element type) {
  switch (type) {
    case Element::f32: return 32;
    case Element::f16:
    case Element::bf16: return 16;
    case Element::fp6:
    case Element::bf6: return 6;
    case Element::fp4: return 4;
    default: return 8;
  }
}

int row_of(int rows, int reg, int lane) {
  const int group = lane / rows;
  return rows == 16 ? 4 * group + reg : 8 * (reg / 4) + 4 * group + reg % 4;
}

// [row][depth] of A, or [column][depth] of B.
struct Operand {
  std::vector<double> value;
  void read(const Wave& w, int reg, Shape shape, Element type, bool split) {
    const int groups = kLanes / shape.rows, run = shape.depth / groups, bits = bits_of(type);
    w.touch_vector(reg, (run * bits + 31) / 32, false);
    value.resize(static_cast<std::size_t>(shape.rows) * static_cast<std::size_t>(shape.depth));
    for (int lane = 0; lane < kLanes; ++lane) {
      const int group = lane / shape.rows;
      for (int j = 0; j < run; ++j) {
        const int at = j * bits;
        u64 word = w.v[reg + at / 32][lane];
        if (at % 32 + bits > 32) word |= static_cast<u64>(w.v[reg + at / 32 + 1][lane]) << 32;
        const u32 ones = bits == 32 ? ~0u : (1u << bits) - 1;
        const u32 code = static_cast<u32>(word >> (at % 32)) & ones;
        // 8-bit elements of the 128-bit products: two runs of 16, half the depth apart.
        const int k = split ? (j / 16) * (shape.depth / 2) + group * 16 + j % 16 : group * run + j;
        value[static_cast<std::size_t>((lane % shape.rows) * shape.depth + k)] =
            element(w, type, code);
      }
    }
  }
};

// scale[lane]: exponents of blocks of 32, of the row lane % rows and the block lane / rows.
void scale_blocks(Operand& operand, Shape shape, const u32 (&scale)[kLanes]) {
  for (int lane = 0; lane < kLanes; ++lane) {
    const int row = lane % shape.rows, block = lane / shape.rows;
    const double by = scale[lane] == 255 ? std::numeric_limits<double>::quiet_NaN()
                                         : std::ldexp(1.0, static_cast<int>(scale[lane]) - 127);
    for (int k = 32 * block; k < 32 * block + 32; ++k)
      operand.value[static_cast<std::size_t>(row * shape.depth + k)] *= by;
  }
}

void multiply(Wave& w, const Inst& i, Shape shape, const Operand& a, const Operand& b,
              bool integers) {
  const int registers = shape.rows * shape.rows / kLanes;
  const bool accumulators = i.bit(kF_acc_cd) != 0;
  const int to = i.vdst + (accumulators ? 256 : 0);
  const Source& c = i.src[2];
  const int from = c.index + (accumulators ? 256 : 0);
  if (c.kind == Kind::vector) w.touch_vector(from, registers, false);
  w.touch_vector(to, registers, true);
  u32 out[16][kLanes];
  for (int reg = 0; reg < registers; ++reg) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const double* row = a.value.data() + row_of(shape.rows, reg, lane) * shape.depth;
      const double* column = b.value.data() + (lane % shape.rows) * shape.depth;
      double sum = 0;
      for (int k = 0; k < shape.depth; ++k) sum += row[k] * column[k];
      const u32 start = c.kind == Kind::vector ? w.v[from + reg][lane]
                                               : static_cast<u32>(constant_bits<u32>(w, c));
      out[reg][lane] = integers ? start + static_cast<u32>(static_cast<i64>(sum))
                                : float_bits(nearly(w, sum + static_cast<double>(bits_float(start)),
                                                    start ^ static_cast<u32>(lane << 8 | reg)));
    }
  }
  for (int reg = 0; reg < registers; ++reg) std::memcpy(w.v[to + reg], out[reg], sizeof out[reg]);
}

int source_register(const Wave& w, const Inst& i, int k) {
  if (i.src[k].kind != Kind::vector) w.fault("a matrix operand that is no vector register");
  return i.src[k].index + ((std::max(i.at(kF_acc), 0) >> k) & 1 ? 256 : 0);
}

constexpr Shape kShapes[] = {{16, 16}, {16, 32}, {32, 8},  {32, 16},  {16, 4},
                             {32, 2},  {16, 64}, {32, 32}, {16, 128}, {32, 64}};
// note: bits 0 .. 3 the shape, 4 .. 7 the elements.
struct Elements {
  const char* word;
  Element a, b;
};
constexpr Elements kElements[] = {
    {"bf16", Element::bf16, Element::bf16},  {"f16", Element::f16, Element::f16},
    {"f32", Element::f32, Element::f32},     {"i8", Element::i8, Element::i8},
    {"fp8_fp8", Element::fp8, Element::fp8}, {"fp8_bf8", Element::fp8, Element::bf8},
    {"bf8_fp8", Element::bf8, Element::fp8}, {"bf8_bf8", Element::bf8, Element::bf8},
};

void plain(Wave& w, const Inst& i) {
  const Shape shape = kShapes[i.note & 15];
  const Elements& elements = kElements[i.note >> 4];
  if (i.bit(kF_cbsz) != 0 || i.bit(kF_abid) != 0 || i.bit(kF_blgp) != 0)
    w.fault("a product with cbsz, abid or blgp is not modelled");
  Operand a, b;
  a.read(w, source_register(w, i, 0), shape, elements.a, false);
  b.read(w, source_register(w, i, 1), shape, elements.b, false);
  multiply(w, i, shape, a, b, elements.a == Element::i8);
}

constexpr Element kSelected[] = {Element::fp8, Element::bf8, Element::fp6, Element::bf6,
                                 Element::fp4};
void selected(Wave& w, const Inst& i, bool scaled) {
  const Shape shape = kShapes[i.note & 15];
  const int of_a = std::max(i.at(kF_cbsz), 0), of_b = std::max(i.at(kF_blgp), 0);
  if (of_a > 4 || of_b > 4) w.fault("a product of an unknown format");
  Operand a, b;
  a.read(w, source_register(w, i, 0), shape, kSelected[of_a], of_a < 2);
  b.read(w, source_register(w, i, 1), shape, kSelected[of_b], of_b < 2);
  if (scaled) {
    for (int k = 0; k < 2; ++k) {
      const int number = i.at(k == 0 ? kF_scale_src0 : kF_scale_src1);
      // Which byte: opsel's bit is its low, opsel_hi's its high.
      const int byte = ((i.opsel >> k) & 1) | ((std::max(i.at(kF_opsel_hi), 0) >> k) & 1) << 1;
      u32 scale[kLanes];
      Source source{number < 128   ? Kind::scalar
                    : number < 256 ? Kind::constant
                                   : Kind::vector,
                    static_cast<u16>(number < 256 ? number : number - 256), 0, false, false};
      if (source.kind == Kind::vector) w.touch_vector(source.index, 1, false);
      for (int lane = 0; lane < kLanes; ++lane) {
        const u32 word =
            source.kind == Kind::vector ? w.v[source.index][lane] : read_scalar<u32>(w, source);
        scale[lane] = (word >> (8 * byte)) & 0xff;
      }
      scale_blocks(k == 0 ? a : b, shape, scale);
    }
  }
  multiply(w, i, shape, a, b, false);
}

}  // namespace

void add_matrix_operations() {
  for (u8 shape = 0; shape < std::size(kShapes); ++shape) {
    const std::string rows = std::to_string(kShapes[shape].rows);
    const std::string size = rows + "x" + rows + "x" + std::to_string(kShapes[shape].depth);
    for (u8 elements = 0; elements < std::size(kElements); ++elements) {
      const std::string word = kElements[elements].word;
      const std::string type = word == "i8" ? "i32" : "f32";
      add(("v_mfma_" + type + "_" + size + "_" + word).c_str(), plain,
          static_cast<u8>(shape | elements << 4));
    }
    add(("v_mfma_f32_" + size + "_f8f6f4").c_str(),
        [](Wave& w, const Inst& i) { selected(w, i, false); }, shape);
    add(("v_mfma_scale_f32_" + size + "_f8f6f4").c_str(),
        [](Wave& w, const Inst& i) { selected(w, i, true); }, shape);
  }
}

}  // namespace amd
