// Texts to the features of an Evenhand model: `data/text.py` in JavaScript, without dependencies, for
// Node and browsers. docs/export.md has the specification in words; queries.json, written beside an
// exported model, has texts and their features to test by.

const GOLDEN = 0x9e3779b97f4a7c15n;
const WORD_HASH = 0x2545f4914f6cdd1dn; // where the hash of a run of words starts
const MOST_MARKS = 30; // combining, one after the other, in texts above 1,000 characters
const SPACES = /[\t-\r\x1c-\x20\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]+/u;
// Scripts without spaces between words: Thai and Lao, Myanmar, Khmer, kana, Han.
const UNSPACED = new RegExp(
  "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u30ff\u31f0-\u31ff\u3400-\u9fff\ua9e0-\ua9ff\uaa60-\uaa7f" +
  "\uf900-\ufaff\u{1aff0}-\u{1b16f}\u{20000}-\u{3ffff}]", "u");

/**
 * The features of texts, as the exported encoder takes them.
 * @param {string[]} texts
 * @param {object} settings `featurizer` of manifest.json
 * @returns {{ids: BigInt64Array, offsets: BigInt64Array, values: Float32Array | null}} those of text t
 *   are at offsets[t] .. offsets[t + 1] - 1; n-grams have no values
 */
export function featurize(texts, settings) {
  const ids = [], values = [], offsets = [0], areWords = settings.kind === "words";
  for (const text of texts) {
    const points = [...`\x02${normalize(text)}\x03`];
    const found = areWords ? words(points, settings) : [];
    found.push(...ngrams(points, settings));
    if (areWords) {
      const counts = new Map();
      for (const id of found) counts.set(id, (counts.get(id) ?? 0) + 1);
      for (const [id, count] of [...counts].sort((one, other) => one[0] - other[0])) {
        ids.push(id);
        values.push(1 + Math.log(count));
      }
    } else {
      for (const id of found) ids.push(id);
    }
    offsets.push(ids.length);
  }
  return {
    ids: BigInt64Array.from(ids, BigInt),
    offsets: BigInt64Array.from(offsets, BigInt),
    values: areWords ? Float32Array.from(values) : null,
  };
}

/** The form in which two spellings count as one: NFKC, case folded, white space joined. */
export function normalize(text) {
  const characters = [...text];
  if (characters.length > 1000) text = streamSafe(characters);
  return [...text.normalize("NFKC")].map(folded).join("").split(SPACES).filter(Boolean).join(" ");
}

function folded(character) { // full case folding, which JavaScript does not have
  if (character === "\u0131") return character;
  if (/\p{Script=Cherokee}/u.test(character)) return character.toUpperCase();
  return character.toLowerCase().toUpperCase().toLowerCase();
}

function streamSafe(characters) { // UAX #15: a joiner after every 30 combining marks in a row
  let text = "", numMarks = 0;
  for (const character of characters) {
    numMarks = isCombining(character) ? numMarks + 1 : 0;
    if (numMarks > MOST_MARKS) {
      text += "\u034f";
      numMarks = 1;
    }
    text += character;
  }
  return text;
}

function isCombining(character) { // U+0345 is of the last class: all others go before it
  if (/[\u0f73\u0f75\u0f81]/u.test(character)) return false;
  return character === "\u0345" || !`\u0345${character}`.normalize("NFD").startsWith("\u0345");
}

function ngrams(points, { min_length: minLength, max_length: maxLength, num_buckets: numBuckets }) {
  const ids = [], hashes = new BigUint64Array(points.length); // which wraps at 64 bits
  for (let length = 1; length <= maxLength; length++) {
    for (let place = 0; place + length <= points.length; place++) {
      const point = points[place + length - 1].codePointAt(0);
      hashes[place] = hashes[place] * GOLDEN + BigInt(point) + BigInt(length);
      const isEndAlone = length === 1 && point <= 3;
      if (length >= minLength && !isEndAlone) ids.push(bucket(mix(hashes[place]), numBuckets));
    }
  }
  return ids;
}

function words(points, { max_words: maxWords, num_buckets: numBuckets }) {
  const ids = [], runs = new BigUint64Array(maxWords); // hashes of the last 1, 2, ... words
  let word = 0n, numPoints = 0n, numWords = 0, firstKind = "separator";
  for (const point of points) {
    const kind = kindOf(point);
    if (kind === "invisible") continue;
    const isApart = kind === "separator" || kind === "alone" || (kind === "letter" && firstKind === "alone");
    if (isApart && numPoints) {
      numWords++;
      for (let run = Math.min(numWords, maxWords) - 1; run >= 0; run--) {
        runs[run] = mix(BigInt.asUintN(64, (run ? runs[run - 1] * GOLDEN : WORD_HASH) + word));
        ids.push(bucket(runs[run], numBuckets));
      }
      word = numPoints = 0n;
    }
    if (kind === "separator") continue;
    if (!numPoints) firstKind = kind;
    numPoints++;
    word = BigInt.asUintN(64, word * GOLDEN + BigInt(point.codePointAt(0)) + numPoints);
  }
  return ids;
}

function kindOf(point) {
  if (/\p{Cf}/u.test(point)) return "invisible";
  if (/\p{So}/u.test(point)) return "alone";
  if (/\p{M}/u.test(point)) return "mark";
  if (!/[\p{L}\p{N}]/u.test(point)) return "separator";
  return UNSPACED.test(point) ? "alone" : "letter";
}

function mix(word) { // the finaliser of SplitMix64
  word = BigInt.asUintN(64, (word ^ (word >> 30n)) * 0xbf58476d1ce4e5b9n);
  word = BigInt.asUintN(64, (word ^ (word >> 27n)) * 0x94d049bb133111ebn);
  return word ^ (word >> 31n);
}

const bucket = (hash, numBuckets) => Number(hash % BigInt(numBuckets));
