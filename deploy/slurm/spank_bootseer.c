/* sbatch --bootseer=REF, instead of --comment=bootseer=REF (docs/howto/slurm.md).
 *
 *   gcc -shared -fPIC -o spank_bootseer.so spank_bootseer.c    with Slurm's headers (Debian: libslurm-dev); build it again
 *                                                              for each release of Slurm
 *   plugstack.conf:  optional /usr/local/lib/bootseer/spank_bootseer.so
 *
 * Slurm hands the option's value to Prolog and Epilog as SPANK__SLURM_SPANK_OPTION_bootseer_bootseer.
 */
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <slurm/spank.h>

SPANK_PLUGIN(bootseer, 1)

static int seen(int value, const char *argument, int remote)
{
	return ESPANK_SUCCESS;
}

static struct spank_option option = {
	"bootseer", "REF", "start in the converted container image REF", 1, 0, seen,
};

int slurm_spank_init(spank_t spank, int count, char **arguments)
{
	return spank_option_register(spank, &option);
}
