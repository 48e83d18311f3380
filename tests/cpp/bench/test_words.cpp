// The command line of a measuring program.
#include "bench/words.hpp"

#include "check.hpp"

namespace {

lowlat::bench::Words read(std::vector<const char*> words) {
  words.insert(words.begin(), "program");
  return lowlat::bench::read_words(static_cast<int>(words.size()), words.data());
}

}  // namespace

TEST_CASE(words_are_read_whole) {
  const auto words =
      read({"--model", "v4", "--tp", "2", "--gpus", "2", "--rows", "1,6,48", "--schedule",
            "persistent", "--repeats", "20", "--stamps", "a.json", "--plain-us", "61.5"});
  CHECK_EQ(words.wrong, "");
  CHECK_EQ(words.model, "v4");
  CHECK_EQ(words.schedule, "persistent");
  CHECK_EQ(words.stamps, "a.json");
  CHECK_EQ(words.plain_us, 61.5);
  CHECK_EQ(words.tp, 2);
  CHECK_EQ(words.gpus, 2);
  CHECK_EQ(words.repeats, 20);
  CHECK(words.rows == (std::vector<int>{1, 6, 48}));
}

TEST_CASE(without_words_the_usual_case) {
  const auto words = read({});
  CHECK_EQ(words.wrong, "");
  CHECK_EQ(words.tp, 4);
  CHECK(words.rows == std::vector<int>{6});
}

TEST_CASE(wrong_words_are_named) {
  CHECK_EQ(read({"--rows", "6,"}).wrong, "no number from 1 to 64: ");
  CHECK_EQ(read({"--rows", "6,65"}).wrong, "no number from 1 to 64: 65");
  CHECK_EQ(read({"--rows", "6 7"}).wrong, "no number from 1 to 64: 6 7");
  CHECK_EQ(read({"--tp", "x"}).wrong, "no number from 1 to 8: x");
  CHECK_EQ(read({"--song", "1"}).wrong, "unknown: --song");
  CHECK_EQ(read({"--plain-us", "-1"}).wrong, "no time: -1");
  CHECK_EQ(read({"--model"}).wrong, "needs a value: --model");
}

TEST_CASE(a_program_of_one_model_and_schedule_names_both) {
  using lowlat::bench::wrong_kind;
  CHECK_EQ(wrong_kind(read({}), "v41", "fused"), "");
  const char* const other =
      "this program is of --model v41 --schedule fused, not --model v4 --schedule fused";
  CHECK_EQ(wrong_kind(read({"--model", "v4"}), "v41", "fused"), other);
  CHECK(wrong_kind(read({"--schedule", "persistent"}), "v41", "fused") != "");
}

TEST_CASE(the_first_reason_is_told) {
  using lowlat::bench::first_of;
  CHECK_EQ(first_of({}), "");
  CHECK_EQ(first_of({"", "a", "b"}), "a");
  CHECK_EQ(first_of({"", lowlat::bench::needless_stamps(read({"--stamps", "a.json"}))}),
           "--stamps needs the program with stamps");
  CHECK_EQ(lowlat::bench::needless_stamps(read({})), "");
}
