// bench/words.hpp: the command line of a measuring program; `lowlat bench` writes it.
//
//   --model v41 --tp 4 --gpus 1 --rows 6,12 --schedule fused --repeats 60 [--stamps FILE
//   --plain-us TIME]
#pragma once

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdlib>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

namespace lowlat::bench {

struct Words {
  std::string model = "v41", schedule = "fused", stamps;
  int tp = 4, gpus = 1, repeats = 60;
  double plain_us = 0.0;  // of a layer without stamps
  std::vector<int> rows = {6};
  std::string wrong;  // one line where the words are not as above
};

inline constexpr int kMostRows = 64;  // of a step

// Whether `text` is a whole number of this range, which `out` then is.
inline bool read_number(std::string_view text, int least, int most, int& out) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
  return error == std::errc() && end == text.data() + text.size() && out >= least && out <= most;
}
inline std::string no_number(std::string_view text, int least, int most) {
  return "no number from " + std::to_string(least) + " to " + std::to_string(most) + ": " +
         std::string(text);
}

inline Words read_words(int argc, const char* const* argv) {
  Words words;
  const auto number = [&](std::string_view text, int least, int most) {
    int value = 0;
    if (!read_number(text, least, most, value)) words.wrong = no_number(text, least, most);
    return value;
  };
  for (int i = 1; i < argc && words.wrong.empty(); i += 2) {
    const std::string_view name = argv[i];
    if (i + 1 == argc) {
      words.wrong = "needs a value: " + std::string(name);
      break;
    }
    const std::string_view value = argv[i + 1];
    if (name == "--model") {
      words.model = value;
    } else if (name == "--schedule") {
      words.schedule = value;
    } else if (name == "--stamps") {
      words.stamps = value;
    } else if (name == "--plain-us") {
      words.plain_us = std::strtod(std::string(value).c_str(), nullptr);
      if (!(words.plain_us > 0)) words.wrong = "no time: " + std::string(value);
    } else if (name == "--tp") {
      words.tp = number(value, 1, 8);
    } else if (name == "--gpus") {
      words.gpus = number(value, 1, 8);
    } else if (name == "--repeats") {
      words.repeats = number(value, 1, 1'000'000);
    } else if (name == "--rows") {
      words.rows.clear();
      for (std::size_t begin = 0; begin <= value.size();) {
        const std::size_t end = std::min(value.find(',', begin), value.size());
        words.rows.push_back(number(value.substr(begin, end - begin), 1, kMostRows));
        begin = end + 1;
      }
    } else {
      words.wrong = "unknown: " + std::string(name);
    }
  }
  return words;
}

// Why a program of this model and schedule alone does not take the words, or nothing.
inline std::string wrong_kind(const Words& words, std::string_view model,
                              std::string_view schedule) {
  if (words.model == model && words.schedule == schedule) return "";
  return "this program is of --model " + std::string(model) + " --schedule " +
         std::string(schedule) + ", not --model " + words.model + " --schedule " + words.schedule;
}

// The first of these reasons that is one.
inline std::string first_of(std::initializer_list<std::string> reasons) {
  for (const std::string& reason : reasons) {
    if (!reason.empty()) return reason;
  }
  return "";
}

// Why a program without stamps does not take the words, or nothing.
inline std::string needless_stamps(const Words& words) {
  return words.stamps.empty() ? "" : "--stamps needs the program with stamps";
}

// Why a layer of so many ranks does not run on so many GPUs, or nothing.
inline std::string wrong_places(const Words& words) {
  const std::string tp = std::to_string(words.tp);
  if (words.tp != 2 && words.tp != 4) return "the layer runs for --tp 2 and 4, not " + tp;
  if (words.gpus == 1 || words.gpus == words.tp) return "";
  return "needed --gpus 1 or one a rank, --gpus " + tp + ", not " + std::to_string(words.gpus);
}

}  // namespace lowlat::bench
