// The ranks of a group commit one version together, or none does. This is one rank's part of it: a state machine
// without I/O, clock or thread, over registers that the ranks share. Pure.
//
// Who runs it does what action() says, answers with the event that stands beside the action, and goes on until it is
// done. All that is asked of the registers: who writes one that has a value changes nothing, and reads what stands
// there. So any store with a compare-and-swap will do: torch.distributed's, a database, a service of one's own.
// Registers of a round with a name may be erased once a later one has a yes: who votes there has left this one. Before
// that somebody may stand still with a no on its way, which would be the first write again.
//
// One round of votes: each rank writes its vote, and waits for those of all others. Who has all of them writes the
// verdict; who waited in vain writes a no. The first write counts, and everybody takes what stands there. So a rank
// that gave up has either prevented a yes, or it finds one and goes along. Who votes no waits too: a verdict before the
// others came would send them on.
//
// Rounds have names, one for each (then who comes late takes the verdict that is there), or are counted: a rank that
// comes late goes on to the first one without a verdict, where the others will be. A group has either kind.
//
// An update is up to three rounds:
//
//   staged        yes: commit                 no: nothing is written        unknown: likewise, others may write
//   written       yes: keep                   no: roll back                 unknown: the weights count as void
//   rolled back   yes: all have the weights of before                       else: not all have, or perhaps not
//
// A failing store, after this rank has voted yes, leaves the outcome unknown to it: the others may have read a yes. A
// rank that has voted no, or not at all, knows better: nobody can. A process that starts again speaks for itself: votes
// of the one before stay, and a yes that only that one gave leaves the outcome unknown, too.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "commit/votes.hpp"

namespace deltasync::commit {

/// What is to be done next, and the events that answer it.
struct Action {
  enum class Kind : std::uint8_t {
    none,       ///< nothing was begun: vote() or update()
    read,       ///< `registers`, if all of them have values → found() in their order, absent(), failed()
    write,      ///< `value` into the one of `registers`, if it has none → stands() with what is there then, failed()
    wait,       ///< a little, before the next look; the caller has the deadline → go_on(whether it has passed)
    word,       ///< say what it is that all lack, bits in hex in `value` → worded()
    commit,     ///< write the staged version, and be able to roll it back → committed()
    roll_back,  ///< to the weights of before → rolled_back()
    void_weights,  ///< what was written counts as no version, `value` says why → voided()
    done,          ///< report()
  };
  Kind kind = Kind::none;
  std::vector<std::string> registers;
  std::string value;
};
std::string_view to_string(Action::Kind kind) noexcept;

/// How a vote or an update has ended.
struct Report {
  enum class Ending : std::uint8_t {
    voted,      ///< of vote(): see `verdict`
    unwritten,  ///< this rank has written nothing; others may have if the verdict is unknown
    kept,       ///< by all ranks
    as_before,  ///< every rank is known to have the weights of before
    doubtful,   ///< not every rank has, or that is unknown
  };
  Ending ending = Ending::voted;
  Verdict verdict;   ///< of the last round
  std::string text;  ///< of as_before and doubtful: what happened
};
std::string_view to_string(Report::Ending ending) noexcept;

/// The guards that tests remove one by one.
enum class Guard : std::uint8_t {
  none,
  all_votes,
  noes_count,
  same_subject,
  lacks_count,
  takes_what_stands,
  own_vote_stands,
  unknown_after_yes,
  skips_decided,
  gives_up,
  commits_on_yes,
  rolls_back,
  voids_unknown,
  interrupt_voids,
  doubts_count,
  settles_on_yes,
};

struct AllGuards {
  static constexpr bool broken(Guard) noexcept { return false; }
};

/// A programmer's mistake ends the process: an event that does not answer the action.
template <class Guards>
class MachineOf {
 public:
  /// `rank` of `ranks`; where it is the only one no register is used.
  MachineOf(std::uint32_t rank, std::uint32_t ranks, Guards guards = {})
      : rank_(rank), ranks_(ranks), guards_(std::move(guards)) {}

  /// Begins one round; whatever was going on is forgotten. `at`: its name; empty: it is counted.
  void vote(Vote vote, std::string at = "");
  /// Begins an update; whatever was going on is forgotten. `staged`: the vote about that; its subject names the
  /// version. `at`: rounds are AT/staged, AT/written, AT/rolled back; empty: they are counted.
  void update(Vote staged, std::string at = "");

  const Action& action() const noexcept { return action_; }
  const Report& report() const noexcept { return report_; }
  /// The name of the round that goes on, or was the last; empty before this rank has chosen one.
  const std::string& round() const noexcept { return name_; }

  void found(const std::vector<std::string>& values);
  void absent();
  void stands(const std::string& value);
  void failed(const std::string& why);
  void go_on(bool late);
  void worded(const std::string& text);
  /// `problem`: why not all is written; what is written is to be rolled back then.
  void committed(std::optional<std::string> problem);
  /// `doubts`: what of this rank's weights is of no version, and why; empty: nothing.
  void rolled_back(const std::string& doubts);
  void voided(const std::string& doubts);
  /// At any time: nobody waits for an outcome any more. What may be written counts as void; then it is done.
  void interrupted();

  /// All that decides what happens next, one after the other, to `sink`: for explorers.
  template <class Sink>
  void describe(Sink&& sink) const;

 private:
  enum class Part : std::uint8_t { vote, staged, written, settled };
  enum class Step : std::uint8_t { idle, skip, cast, votes, verdict, wait, missing, word, propose, work };

  void begin(Part part, Vote vote);
  void open(const std::string& round);
  void look();
  void tally(std::vector<Vote> votes);
  void propose(const std::string& reason);
  void take(const std::string& value);
  void decided(Verdict verdict);
  void decided_about_staged();
  void decided_about_written();
  void decided_about_rollback();
  void ask_for_missing();
  void give_up();
  std::optional<std::vector<Vote>> decoded(const std::vector<std::string>& values);

  void read(Step step, std::vector<std::string> registers);
  void write(Step step, std::string name, std::string value);
  void work(Action::Kind kind, std::string value = "");
  void void_weights();
  void done(Report::Ending ending, std::string text = "");

  std::string vote_of(std::uint32_t rank) const { return name_ + "/vote/" + std::to_string(rank); }
  std::string verdict_register() const { return name_ + "/verdict"; }
  std::string myself() const { return "rank " + std::to_string(rank_) + ": "; }
  /// What this rank objects to, and then `what`.
  std::string beside_own(const std::string& what) const {
    return mine_.reason ? myself() + *mine_.reason + "; " + what : what;
  }
  bool broken(Guard guard) const noexcept { return guards_.broken(guard); }
  void expect(bool holds, const char* event) const;

  // Constant after construction.
  std::uint32_t rank_;
  std::uint32_t ranks_;
  Guards guards_;

  std::uint64_t round_ = 0;  ///< the next counted one
  Part part_ = Part::vote;
  Step step_ = Step::idle;
  Action action_;
  Report report_;
  std::string at_;       ///< of the update
  std::string subject_;  ///< of the update
  std::string failure_;  ///< why it is rolled back
  // Of the round.
  std::string name_;
  Vote mine_;
  std::string cast_;     ///< mine_, as it is written
  bool voted_ = false;   ///< it may stand there
  bool stands_ = false;  ///< it does
  bool late_ = false;    ///< the deadline has passed
  std::vector<Vote> heard_;
  std::uint32_t asked_ = 0;  ///< at the deadline, who is asked for
  std::vector<std::uint32_t> missing_;
};

using Machine = MachineOf<AllGuards>;
extern template class MachineOf<AllGuards>;

// ---- rounds ------------------------------------------------------------------------------------------------------

template <class Guards>
void MachineOf<Guards>::vote(Vote vote, std::string at) {
  at_ = std::move(at);
  begin(Part::vote, std::move(vote));
}

template <class Guards>
void MachineOf<Guards>::update(Vote staged, std::string at) {
  at_ = std::move(at);
  subject_ = staged.subject;
  begin(Part::staged, std::move(staged));
}

template <class Guards>
void MachineOf<Guards>::begin(Part part, Vote vote) {
  part_ = part;
  mine_ = std::move(vote);
  name_.clear();
  cast_.clear();
  voted_ = stands_ = late_ = false;
  heard_.clear();
  missing_.clear();
  if (ranks_ == 1) return tally({mine_});
  if (at_.empty()) return read(Step::skip, {std::to_string(round_) + "/verdict"});
  switch (part) {
    case Part::vote: return open(at_);
    case Part::staged: return open(at_ + "/staged");
    case Part::written: return open(at_ + "/written");
    case Part::settled: return open(at_ + "/rolled back");
  }
}

template <class Guards>
void MachineOf<Guards>::open(const std::string& round) {
  name_ = round;
  Vote vote = mine_;
  if (vote.reason) vote.reason = myself() + *vote.reason;
  cast_ = encode(vote);
  voted_ = true;  // it may arrive, whatever the store says
  write(Step::cast, vote_of(rank_), cast_);
}

template <class Guards>
void MachineOf<Guards>::look() {
  std::vector<std::string> votes;
  for (std::uint32_t rank = 0; rank < ranks_; ++rank) votes.push_back(vote_of(rank));
  read(Step::votes, std::move(votes));
}

template <class Guards>
void MachineOf<Guards>::found(const std::vector<std::string>& values) {
  expect(action_.kind == Action::Kind::read && values.size() == action_.registers.size(), "found");
  switch (step_) {
    case Step::skip:
      if (!broken(Guard::skips_decided)) return read(Step::skip, {std::to_string(++round_) + "/verdict"});
      return absent();
    case Step::verdict: return take(values[0]);
    case Step::votes:
      if (auto votes = decoded(values)) tally(*std::move(votes));
      return;
    default: break;  // missing: it has come
  }
  if (auto vote = decoded(values)) {
    heard_.push_back(std::move(vote->front()));
    ++asked_;
    ask_for_missing();
  }
}

template <class Guards>
void MachineOf<Guards>::absent() {
  expect(action_.kind == Action::Kind::read, "absent");
  switch (step_) {
    case Step::skip: return open(std::to_string(round_++));
    case Step::votes:
      if (!late_) return read(Step::verdict, {verdict_register()});
      asked_ = 0;
      return ask_for_missing();
    case Step::verdict:
      step_ = Step::wait;
      action_ = {Action::Kind::wait, {}, ""};
      return;
    default:  // missing
      missing_.push_back(asked_++);
      return ask_for_missing();
  }
}

template <class Guards>
void MachineOf<Guards>::stands(const std::string& value) {
  expect(action_.kind == Action::Kind::write, "stands");
  if (step_ == Step::propose) return take(broken(Guard::takes_what_stands) ? std::string(action_.value) : value);
  stands_ = value == cast_;
  look();
}

template <class Guards>
void MachineOf<Guards>::go_on(bool late) {
  expect(step_ == Step::wait, "go_on");
  late_ = late && !broken(Guard::gives_up);
  look();
}

template <class Guards>
void MachineOf<Guards>::failed(const std::string& why) {
  expect(action_.kind == Action::Kind::read || action_.kind == Action::Kind::write, "failed");
  const std::string reason = myself() + "the store that the ranks share failed: " + why;
  const bool unknown = voted_ && !mine_.reason && !broken(Guard::unknown_after_yes);
  decided({unknown ? Outcome::unknown : Outcome::no, beside_own(reason), mine_.doubt});
}

template <class Guards>
std::optional<std::vector<Vote>> MachineOf<Guards>::decoded(const std::vector<std::string>& values) {
  std::vector<Vote> votes;
  for (const std::string& value : values) {
    auto vote = decode_vote(value);
    if (!vote) {
      failed(vote.error().message());
      return std::nullopt;
    }
    votes.push_back(*std::move(vote));
  }
  return votes;
}

/// Each rank by itself, to name those who have not come.
template <class Guards>
void MachineOf<Guards>::ask_for_missing() {
  if (asked_ < ranks_) return read(Step::missing, {vote_of(asked_)});
  if (missing_.empty() || broken(Guard::all_votes)) return tally(std::exchange(heard_, {}));
  give_up();
}

template <class Guards>
void MachineOf<Guards>::give_up() {
  propose(beside_own("rank " + std::to_string(rank_) + " has waited in vain for " + name_ranks(missing_)));
}

template <class Guards>
void MachineOf<Guards>::tally(std::vector<Vote> votes) {
  heard_ = std::move(votes);
  for (Vote& vote : heard_) {
    if (broken(Guard::noes_count)) vote.reason.reset();
    if (broken(Guard::same_subject)) vote.subject.clear();
  }
  const Tally tally = count(heard_);
  if (tally.lacking.empty() || broken(Guard::lacks_count)) return propose(tally.objection);
  step_ = Step::word;
  action_ = {Action::Kind::word, {}, tally.lacking};
}

template <class Guards>
void MachineOf<Guards>::worded(const std::string& text) {
  expect(step_ == Step::word, "worded");
  propose(text.empty() ? "no rank takes all of it" : text);
}

template <class Guards>
void MachineOf<Guards>::propose(const std::string& reason) {
  const bool yes = ranks_ == 1 ? reason.empty() && !mine_.reason : reason.empty();
  const Verdict verdict{yes ? Outcome::yes : Outcome::no, reason, doubts_of(heard_)};
  if (ranks_ == 1) return decided(verdict);
  write(Step::propose, verdict_register(), encode(verdict));
}

template <class Guards>
void MachineOf<Guards>::take(const std::string& value) {
  auto verdict = decode_verdict(value);
  if (!verdict) return failed(verdict.error().message());
  if (verdict->outcome == Outcome::yes && !stands_ && !broken(Guard::own_vote_stands)) {
    verdict->outcome = Outcome::unknown;
    verdict->reason =
        beside_own(myself() + "an earlier process of this rank has voted in this round, and all ranks yes");
  }
  decided(*std::move(verdict));
}

// ---- what follows from a verdict ---------------------------------------------------------------------------------

template <class Guards>
void MachineOf<Guards>::decided(Verdict verdict) {
  report_ = {Report::Ending::voted, std::move(verdict), ""};
  switch (part_) {
    case Part::vote: return done(Report::Ending::voted);
    case Part::staged: return decided_about_staged();
    case Part::written: return decided_about_written();
    case Part::settled: return decided_about_rollback();
  }
}

template <class Guards>
void MachineOf<Guards>::decided_about_staged() {
  const bool yes = report_.verdict.outcome == Outcome::yes || (broken(Guard::commits_on_yes) && !mine_.reason);
  if (!yes) return done(Report::Ending::unwritten);
  work(Action::Kind::commit);
}

template <class Guards>
void MachineOf<Guards>::committed(std::optional<std::string> problem) {
  expect(action_.kind == Action::Kind::commit, "committed");
  begin(Part::written, {std::move(problem), subject_ + " is written", "", ""});
}

template <class Guards>
void MachineOf<Guards>::decided_about_written() {
  failure_ = report_.verdict.reason;
  switch (report_.verdict.outcome) {
    case Outcome::yes: return done(Report::Ending::kept);
    case Outcome::unknown:
      if (broken(Guard::voids_unknown)) return done(Report::Ending::doubtful);
      return void_weights();
    case Outcome::no:
      if (broken(Guard::rolls_back)) return begin(Part::settled, {{}, subject_ + " is rolled back", "", ""});
      return work(Action::Kind::roll_back);
  }
}

template <class Guards>
void MachineOf<Guards>::void_weights() {
  work(Action::Kind::void_weights, "whether the other ranks keep " + subject_ + " is unknown");
}

template <class Guards>
void MachineOf<Guards>::voided(const std::string& doubts) {
  expect(action_.kind == Action::Kind::void_weights, "voided");
  done(Report::Ending::doubtful, "THE OUTCOME IS UNKNOWN: " + failure_ + "; " + doubts);
}

template <class Guards>
void MachineOf<Guards>::rolled_back(const std::string& doubts) {
  expect(action_.kind == Action::Kind::roll_back, "rolled_back");
  Vote vote{{}, subject_ + " is rolled back", "", ""};
  if (!doubts.empty() && !broken(Guard::doubts_count)) vote.reason = doubts;
  begin(Part::settled, std::move(vote));
}

template <class Guards>
void MachineOf<Guards>::decided_about_rollback() {
  const Verdict& verdict = report_.verdict;
  if (verdict.outcome == Outcome::yes || broken(Guard::settles_on_yes)) {
    return done(Report::Ending::as_before, "all was rolled back, the weights of all ranks are as before: " + failure_);
  }
  const char* known = verdict.outcome == Outcome::no ? "NOT ALL RANKS" : "PERHAPS NOT ALL RANKS";
  done(Report::Ending::doubtful,
       std::string(known) + " HAVE THE WEIGHTS OF BEFORE: " + verdict.reason + "; what failed: " + failure_);
}

template <class Guards>
void MachineOf<Guards>::interrupted() {
  const bool is_working = step_ == Step::work && action_.kind != Action::Kind::done;
  const bool may_have_written = (part_ == Part::written && action_.kind != Action::Kind::done) || is_working;
  report_ = {Report::Ending::voted, {Outcome::unknown, myself() + "interrupted", mine_.doubt}, ""};
  failure_ = report_.verdict.reason;
  if (may_have_written && !broken(Guard::interrupt_voids)) return void_weights();
  switch (part_) {
    case Part::vote: return done(Report::Ending::voted);
    case Part::staged: return done(Report::Ending::unwritten);
    default: return done(Report::Ending::doubtful);
  }
}

// ---- actions -----------------------------------------------------------------------------------------------------

template <class Guards>
void MachineOf<Guards>::read(Step step, std::vector<std::string> registers) {
  step_ = step;
  action_ = {Action::Kind::read, std::move(registers), ""};
}

template <class Guards>
void MachineOf<Guards>::write(Step step, std::string name, std::string value) {
  step_ = step;
  action_ = {Action::Kind::write, {std::move(name)}, std::move(value)};
}

template <class Guards>
void MachineOf<Guards>::work(Action::Kind kind, std::string value) {
  step_ = Step::work;
  action_ = {kind, {}, std::move(value)};
}

template <class Guards>
void MachineOf<Guards>::done(Report::Ending ending, std::string text) {
  report_.ending = ending;
  report_.text = std::move(text);
  work(Action::Kind::done);
}

template <class Guards>
void MachineOf<Guards>::expect(bool holds, const char* event) const {
  if (holds) [[likely]]
    return;
  std::fprintf(stderr, "deltasync: the group commit was told `%s`, which answers no `%s`\n", event,
               std::string(to_string(action_.kind)).c_str());
  std::abort();
}

template <class Guards>
template <class Sink>
void MachineOf<Guards>::describe(Sink&& sink) const {
  for (const std::uint64_t number : {round_, std::uint64_t(part_), std::uint64_t(step_), std::uint64_t(action_.kind),
                                     std::uint64_t(report_.ending), std::uint64_t(report_.verdict.outcome),
                                     std::uint64_t(voted_ + 2 * stands_ + 4 * late_), std::uint64_t(asked_)}) {
    sink(std::to_string(number));
  }
  for (const std::string* text : {&action_.value, &report_.verdict.reason, &report_.verdict.doubt, &report_.text, &at_,
                                  &subject_, &failure_, &name_, &cast_}) {
    sink(*text);
  }
  const auto describe_vote = [&](const Vote& vote) {
    sink(vote.reason ? "no " + *vote.reason : "yes");
    for (const std::string* text : {&vote.subject, &vote.doubt, &vote.lacks}) sink(*text);
  };
  describe_vote(mine_);
  for (const Vote& vote : heard_) describe_vote(vote);
  for (const std::uint32_t rank : missing_) sink(std::to_string(rank));
}

}  // namespace deltasync::commit
