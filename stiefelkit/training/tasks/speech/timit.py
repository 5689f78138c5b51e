"""Who is in the development and the core test set of TIMIT; the other speakers of TEST are in neither."""

__all__ = ["CORE_TEST", "DEVELOPMENT"]

CORE_TEST = frozenset(
    "fdhc0 felc0 fjlm0 fmgd0 fmld0 fnlp0 fpas0 fpkt0 mbpm0 mcmj0 mdab0 mgrt0 mjdh0 mjln0 mjmp0 mklt0 mlll0 mlnt0 mnjm0 "
    "mpam0 mtas1 mtls0 mwbt0 mwew0".split()
)
"""24 speakers, 192 sentences: those that the corpus itself names."""

DEVELOPMENT = frozenset(
    "fadg0 faks0 fcal1 fcmh0 fdac1 fdms0 fdrw0 fedw0 fgjd0 fjem0 fjmg0 fjsj0 fkms0 fmah0 fmml0 fnmr0 frew0 fsem0 majc0 "
    "mbdg0 mbns0 mbwm0 mcsh0 mdlf0 mdls0 mdvc0 mers0 mgjf0 mglb0 mgwt0 mjar0 mjfc0 mjsw0 mmdb1 mmdm2 mmjr0 mmwh0 mpdf0 "
    "mrcs0 mreb0 mrjm4 mrjr0 mroa0 mrtk0 mrws1 mtaa0 mtdt0 mteb0 mthc0 mwjg0".split()
)
"""50 speakers, 400 sentences (Halberstadt 1998)."""
