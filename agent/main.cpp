#include "agent/program.hpp"

int main(int argc, char** argv) {
  return deltasync::agent::run(argc, argv);
}
