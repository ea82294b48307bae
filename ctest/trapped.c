// Proves that the trap works: each way out that it watches must be caught.

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int main(int argc, char **argv)
{
    const char *what = argc == 2 ? argv[1] : "";
    if (strcmp(what, "write") == 0) return write(2, "x", 1) == 1 ? 0 : 1;
    if (strcmp(what, "exit") == 0) exit(0);
    if (strcmp(what, "abort") == 0) abort();
    if (strcmp(what, "signal") == 0) return signal(SIGUSR1, SIG_IGN) == SIG_ERR;
    return 1;
}
