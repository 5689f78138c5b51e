/* Scores of the search as Sphinx has them, but for pages of maintainers and lists, which come after the guides. */
var Scorer = {
  score: ([page, , , , score]) =>
    score - (/^(architecture|bibliography|benchmark|contributing|coverage|device-code|gpu|measurements|papers|peer-suites|results|suite|generated)/.test(page) ? 6 : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
