// The agent as a program: from its command line to its exit code.
#pragma once

namespace deltasync::agent {

/// Until a signal or the end of its owner. One of the exit codes that --help lists.
int run(int argc, char** argv);

}  // namespace deltasync::agent
